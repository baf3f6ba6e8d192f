#include "isa.h"

#include <cstring>

#ifdef OCTAVO_X86
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif
#if defined(OCTAVO_ARM64) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(OCTAVO_ARM64) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace octavo {
namespace {

#ifdef OCTAVO_X86

uint64_t enabled_state() {
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

// Linux saves the 8 KiB of tiles for processes that ask, and lets no other use them.
bool may_use_tiles() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

struct Cpu {
  bool has_avx2 = false;        // with FMA and F16C
  bool has_avx512vnni = false;  // F, BW, DQ, VL, VNNI
  bool has_amx = false;         // tiles of bfloat16, with AVX-512 VNNI and BF16, and allowed to this process

  Cpu() {
    uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return;
    const bool fma = c >> 12 & 1, osxsave = c >> 27 & 1, avx = c >> 28 & 1, f16c = c >> 29 & 1;
    if (!osxsave || !avx) return;
    const uint64_t state = enabled_state();  // what the operating system saves of the registers
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
    has_avx2 = fma && f16c && (b >> 5 & 1) && (state & 0x6) == 0x6;
    const bool f = b >> 16 & 1, dq = b >> 17 & 1, bw = b >> 30 & 1, vl = b >> 31 & 1, vnni = c >> 11 & 1;
    has_avx512vnni = has_avx2 && f && dq && bw && vl && vnni && (state & 0xe6) == 0xe6;
    const bool tile = d >> 24 & 1, tile_bf16 = d >> 22 & 1;
    if (!has_avx512vnni || !tile || !tile_bf16 || (state & 0x60000) != 0x60000) return;
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d)) return;
    const bool avx512_bf16 = a >> 5 & 1;
    has_amx = avx512_bf16 && may_use_tiles();
  }
};

const Cpu& cpu() {
  static const Cpu found;
  return found;
}

#endif

#ifdef OCTAVO_ARM64

// The dot products of bytes (SDOT). Where the system has no way to tell that is known here, they are not used.
bool has_dot_product() {
#if defined(__linux__)
  constexpr unsigned long kAsimdDotProduct = 1ul << 20;  // HWCAP_ASIMDDP, which old headers lack
  return (getauxval(AT_HWCAP) & kAsimdDotProduct) != 0;
#elif defined(__APPLE__)
  int value = 0;
  size_t size = sizeof value;
  return sysctlbyname("hw.optional.arm.FEAT_DotProd", &value, &size, nullptr, 0) == 0 && value != 0;
#else
  return false;
#endif
}

#endif

}  // namespace

const Kernels* const* compiled_kernels() {
  static const Kernels* const all[] = {
#ifdef OCTAVO_X86
#ifdef OCTAVO_AMX
      &amx::kKernels,
#endif
      &avx512vnni::kKernels, &avx2::kKernels,
#endif
#ifdef OCTAVO_ARM64
      &neondot::kKernels,    &neon::kKernels,
#endif
      &scalar::kKernels,     nullptr,
  };
  return all;
}

bool can_run(const Kernels& kernels) {
#ifdef OCTAVO_X86
  if (std::strcmp(kernels.name, "amx") == 0) return cpu().has_amx;
  if (std::strcmp(kernels.name, "avx512vnni") == 0) return cpu().has_avx512vnni;
  if (std::strcmp(kernels.name, "avx2") == 0) return cpu().has_avx2;
#endif
#ifdef OCTAVO_ARM64
  if (std::strcmp(kernels.name, "neondot") == 0) return has_dot_product();
  if (std::strcmp(kernels.name, "neon") == 0) return true;  // every 64-bit Arm processor has it
#endif
  return std::strcmp(kernels.name, "scalar") == 0;
}

}  // namespace octavo
