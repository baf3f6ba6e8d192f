// What the machine can do at most, for `octavo bench kernels` to put the kernels' figures beside: bytes read from
// memory, and multiply-adds in registers with the instructions that one instruction set's matmuls are made of.
//
// Each method does a known amount of work on all threads and returns how much; the caller takes the time. Multiply-adds
// are written in assembly where there is a choice, so that no compiler finds a way around doing them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <cstring>
#include <string>

#include "isa.h"
#include "threads.h"

#include <initializer_list>

#ifdef OCTAVO_X86
#include <immintrin.h>
#endif

namespace nb = nanobind;

namespace octavo {
namespace {

constexpr int kAccumulators = 10;  // independent chains: as many as latency times instructions a cycle
constexpr int kTasksPerThread = 8;
// Never read; results go here so that they count as used.
volatile int64_t sink;

struct PeakLoops {
  int integer_operations;  // multiplications and additions of one round, over all accumulators
  int float_operations;
  void (*integer)(int64_t num_rounds);
  void (*floating)(int64_t num_rounds);
};

// --- plain vectors of 16 bytes, what a compiler makes of portable code --------------------------------------------

typedef int16_t short8 __attribute__((vector_size(16)));
typedef float float4 __attribute__((vector_size(16)));

// Named sums, one by one: of an array, gcc keeps the elements in memory.
#define OCTAVO_SUMS s0, s1, s2, s3, s4, s5, s6, s7, s8, s9

template <class Vector>
void multiply_add_plain(int64_t num_rounds) {
  Vector s0{}, s1{}, s2{}, s3{}, s4{}, s5{}, s6{}, s7{}, s8{}, s9{}, a{}, b{};
  for (int64_t round = 0; round < num_rounds; ++round) {
    for (Vector* sum : {&s0, &s1, &s2, &s3, &s4, &s5, &s6, &s7, &s8, &s9}) {
#if defined(OCTAVO_X86)
      asm volatile("" : "+x"(a), "+x"(b));
#elif defined(OCTAVO_ARM64)
      asm volatile("" : "+w"(a), "+w"(b));
#else
      asm volatile("" : "+m"(a), "+m"(b));  // the name of a vector register is not known here
#endif
      *sum += a * b;
    }
  }
  for (const Vector& sum : {OCTAVO_SUMS}) sink = sink + static_cast<int64_t>(sum[0]);
}

const PeakLoops kPlain = {kAccumulators * 8 * 2, kAccumulators * 4 * 2, multiply_add_plain<short8>,
                          multiply_add_plain<float4>};

// One round: the instruction once for each sum.
#define OCTAVO_TEN(step) \
  step("%0") step("%1") step("%2") step("%3") step("%4") step("%5") step("%6") step("%7") step("%8") step("%9")
#define OCTAVO_IN_PLACE(type) \
  "+" type(s0), "+" type(s1), "+" type(s2), "+" type(s3), "+" type(s4), "+" type(s5), "+" type(s6), "+" type(s7), \
      "+" type(s8), "+" type(s9)

#ifdef OCTAVO_X86

#define OCTAVO_FMA(sum) "vfmadd231ps %[b], %[a], " sum "\n\t"
#define OCTAVO_DOT(sum) "vpdpbusd %[b], %[a], " sum "\n\t"
#define OCTAVO_PAIRS(sum) "vpmaddubsw %[b], %[a], %[product]\n\tvpaddw %[product], " sum ", " sum "\n\t"

// --- AVX2: pairs of bytes multiplied and added into 16 bits, sums in 16 bits ---------------------------------------

__attribute__((target("avx2,fma"))) void multiply_add_bytes_avx2(int64_t num_rounds) {
  __m256i s0{}, s1{}, s2{}, s3{}, s4{}, s5{}, s6{}, s7{}, s8{}, s9{}, a{}, b{}, product;
  for (int64_t round = 0; round < num_rounds; ++round) {
    asm volatile(OCTAVO_TEN(OCTAVO_PAIRS) : OCTAVO_IN_PLACE("x"), [product] "=&x"(product) : [a] "x"(a), [b] "x"(b));
  }
  for (const __m256i& sum : {OCTAVO_SUMS}) sink = sink + static_cast<int64_t>(sum[0]);
}

__attribute__((target("avx2,fma"))) void multiply_add_floats_avx2(int64_t num_rounds) {
  __m256 s0{}, s1{}, s2{}, s3{}, s4{}, s5{}, s6{}, s7{}, s8{}, s9{}, a{}, b{};
  for (int64_t round = 0; round < num_rounds; ++round) {
    asm volatile(OCTAVO_TEN(OCTAVO_FMA) : OCTAVO_IN_PLACE("x") : [a] "x"(a), [b] "x"(b));
  }
  for (const __m256& sum : {OCTAVO_SUMS}) sink = sink + static_cast<int64_t>(sum[0]);
}

const PeakLoops kAvx2 = {kAccumulators * 32 * 2, kAccumulators * 8 * 2, multiply_add_bytes_avx2,
                         multiply_add_floats_avx2};

// --- AVX-512 VNNI: four bytes multiplied and added into 32 bits, one instruction -----------------------------------

__attribute__((target("avx512f,avx512vnni"))) void multiply_add_bytes_avx512(int64_t num_rounds) {
  __m512i s0{}, s1{}, s2{}, s3{}, s4{}, s5{}, s6{}, s7{}, s8{}, s9{}, a{}, b{};
  for (int64_t round = 0; round < num_rounds; ++round) {
    asm volatile(OCTAVO_TEN(OCTAVO_DOT) : OCTAVO_IN_PLACE("v") : [a] "v"(a), [b] "v"(b));
  }
  for (const __m512i& sum : {OCTAVO_SUMS}) sink = sink + static_cast<int64_t>(sum[0]);
}

__attribute__((target("avx512f,avx512vnni"))) void multiply_add_floats_avx512(int64_t num_rounds) {
  __m512 s0{}, s1{}, s2{}, s3{}, s4{}, s5{}, s6{}, s7{}, s8{}, s9{}, a{}, b{};
  for (int64_t round = 0; round < num_rounds; ++round) {
    asm volatile(OCTAVO_TEN(OCTAVO_FMA) : OCTAVO_IN_PLACE("v") : [a] "v"(a), [b] "v"(b));
  }
  for (const __m512& sum : {OCTAVO_SUMS}) sink = sink + static_cast<int64_t>(sum[0]);
}

const PeakLoops kAvx512 = {kAccumulators * 64 * 2, kAccumulators * 16 * 2, multiply_add_bytes_avx512,
                           multiply_add_floats_avx512};

#ifdef OCTAVO_AMX

// --- AMX: 16 rows by 16 columns by 32 bfloat16, one instruction; four sums in flight hide its latency --------------

void multiply_add_tiles(int64_t num_rounds) {
  alignas(64) uint8_t config[64] = {1};
  for (int tile = 0; tile < 8; ++tile) {
    config[16 + 2 * tile] = 64;  // bytes of a row
    config[48 + tile] = 16;      // rows
  }
  asm volatile("ldtilecfg %0" ::"m"(config));
  for (int64_t round = 0; round < num_rounds; ++round) {
    asm volatile(
        "tdpbf16ps %tmm5, %tmm4, %tmm0\n\t"
        "tdpbf16ps %tmm5, %tmm4, %tmm1\n\t"
        "tdpbf16ps %tmm5, %tmm4, %tmm2\n\t"
        "tdpbf16ps %tmm5, %tmm4, %tmm3\n\t");
  }
  asm volatile("tilerelease");
}

const PeakLoops kAmx = {4 * 16 * 16 * 32 * 2, kAccumulators * 16 * 2, multiply_add_tiles, multiply_add_floats_avx512};

#endif

#endif

#ifdef OCTAVO_ARM64

// --- NEON: eight bytes multiplied and added into 16 bits; with the dot product, sixteen into 32 bits ---------------

#define OCTAVO_LONG(sum) "smlal " sum ".8h, %[a].8b, %[b].8b\n\t"
#define OCTAVO_SDOT(sum) "sdot " sum ".4s, %[a].16b, %[b].16b\n\t"
#define OCTAVO_FMLA(sum) "fmla " sum ".4s, %[a].4s, %[b].4s\n\t"

void multiply_add_bytes_neon(int64_t num_rounds) {
  short8 s0{}, s1{}, s2{}, s3{}, s4{}, s5{}, s6{}, s7{}, s8{}, s9{}, a{}, b{};
  for (int64_t round = 0; round < num_rounds; ++round) {
    asm volatile(OCTAVO_TEN(OCTAVO_LONG) : OCTAVO_IN_PLACE("w") : [a] "w"(a), [b] "w"(b));
  }
  for (const short8& sum : {OCTAVO_SUMS}) sink = sink + static_cast<int64_t>(sum[0]);
}

#if defined(__clang__)
__attribute__((target("dotprod")))
#else
__attribute__((target("arch=armv8.2-a+dotprod")))
#endif
void multiply_add_bytes_neondot(int64_t num_rounds) {
  short8 s0{}, s1{}, s2{}, s3{}, s4{}, s5{}, s6{}, s7{}, s8{}, s9{}, a{}, b{};
  for (int64_t round = 0; round < num_rounds; ++round) {
    asm volatile(OCTAVO_TEN(OCTAVO_SDOT) : OCTAVO_IN_PLACE("w") : [a] "w"(a), [b] "w"(b));
  }
  for (const short8& sum : {OCTAVO_SUMS}) sink = sink + static_cast<int64_t>(sum[0]);
}

void multiply_add_floats_neon(int64_t num_rounds) {
  float4 s0{}, s1{}, s2{}, s3{}, s4{}, s5{}, s6{}, s7{}, s8{}, s9{}, a{}, b{};
  for (int64_t round = 0; round < num_rounds; ++round) {
    asm volatile(OCTAVO_TEN(OCTAVO_FMLA) : OCTAVO_IN_PLACE("w") : [a] "w"(a), [b] "w"(b));
  }
  for (const float4& sum : {OCTAVO_SUMS}) sink = sink + static_cast<int64_t>(sum[0]);
}

const PeakLoops kNeon = {kAccumulators * 8 * 2, kAccumulators * 4 * 2, multiply_add_bytes_neon,
                         multiply_add_floats_neon};
const PeakLoops kNeonDot = {kAccumulators * 16 * 2, kAccumulators * 4 * 2, multiply_add_bytes_neondot,
                            multiply_add_floats_neon};

#endif

typedef uint64_t words2 __attribute__((vector_size(16), aligned(8), may_alias));

int64_t sum_words(const char* data, int64_t begin, int64_t end) {
  const words2* at = reinterpret_cast<const words2*>(data + begin * 8);
  const words2* const last = at + (end - begin) / 8 * 4;
  words2 s0{}, s1{}, s2{}, s3{};
  for (; at < last; at += 4) {
    __builtin_prefetch(reinterpret_cast<const char*>(at) + 4096);
    s0 += at[0];
    s1 += at[1];
    s2 += at[2];
    s3 += at[3];
  }
  s0 += s1 + s2 + s3;
  uint64_t total = s0[0] + s0[1];
  for (begin += (end - begin) / 8 * 8; begin < end; ++begin) {
    uint64_t word;
    std::memcpy(&word, data + begin * 8, 8);
    total += word;
  }
  return static_cast<int64_t>(total);
}

const PeakLoops& loops_of(const std::string& isa) {
  for (const Kernels* const* each = compiled_kernels(); *each != nullptr; ++each) {
    if (isa != (*each)->name) continue;
    if (!can_run(**each)) break;
#ifdef OCTAVO_X86
#ifdef OCTAVO_AMX
    if (isa == "amx") return kAmx;
#endif
    if (isa == "avx512vnni") return kAvx512;
    if (isa == "avx2") return kAvx2;
#endif
#ifdef OCTAVO_ARM64
    if (isa == "neondot") return kNeonDot;
    if (isa == "neon") return kNeon;
#endif
    return kPlain;
  }
  throw nb::value_error(("no such kernels on this machine: " + isa).c_str());
}

class MachinePeak {
 public:
  MachinePeak(const std::string& isa, int num_threads) : loops_(loops_of(isa)), pool_(num_threads) {}

  // Reads every byte of a contiguous buffer once; returns how many.
  int64_t read(nb::handle array) {
    Py_buffer buffer;
    if (PyObject_GetBuffer(array.ptr(), &buffer, PyBUF_SIMPLE) != 0) throw nb::python_error();
    struct Job {
      const char* data;
      int64_t num_words, num_tasks;
    } job{static_cast<const char*>(buffer.buf), buffer.len / 8, pool_.num_threads() * kTasksPerThread};
    {
      nb::gil_scoped_release released;
      pool_.run(
          static_cast<int>(job.num_tasks),
          [](void* context, int index, int) {
            const Job& some = *static_cast<Job*>(context);
            sink = sink + sum_words(some.data, some.num_words * index / some.num_tasks,
                                    some.num_words * (index + 1) / some.num_tasks);
          },
          &job);
    }
    const int64_t num_bytes = job.num_words * 8;
    PyBuffer_Release(&buffer);
    return num_bytes;
  }

  // Returns the number of multiplications and additions done.
  int64_t integer_operations(int64_t num_rounds) { return multiply(loops_.integer, loops_.integer_operations, num_rounds); }
  int64_t float_operations(int64_t num_rounds) { return multiply(loops_.floating, loops_.float_operations, num_rounds); }

 private:
  int64_t multiply(void (*loop)(int64_t), int operations_per_round, int64_t num_rounds) {
    struct Job {
      void (*loop)(int64_t);
      int64_t num_rounds;
    } job{loop, num_rounds};
    const int num_tasks = pool_.num_threads() * kTasksPerThread;
    {
      nb::gil_scoped_release released;
      pool_.run(
          num_tasks, [](void* context, int, int) { static_cast<Job*>(context)->loop(static_cast<Job*>(context)->num_rounds); },
          &job);
    }
    return num_tasks * num_rounds * operations_per_round;
  }

  const PeakLoops& loops_;
  ThreadPool pool_;
};

}  // namespace

void register_machine_peak(nb::module_& module) {
  nb::class_<MachinePeak>(module, "MachinePeak")
      .def(nb::init<const std::string&, int>(), nb::arg("isa"), nb::arg("num_threads"))
      .def("read", &MachinePeak::read, nb::arg("array"))
      .def("integer_operations", &MachinePeak::integer_operations, nb::arg("num_rounds"))
      .def("float_operations", &MachinePeak::float_operations, nb::arg("num_rounds"));
}

}  // namespace octavo
