// octavo_kernel_tests: compares every kernel of every instruction set this machine can run with plain formulas, and a
// row's bits alone with its bits among others.
//
//     octavo_kernel_tests              all variants that can run here
//     octavo_kernel_tests NAME ...     these; fails if one cannot run
#include <cstdio>
#include <cstring>
#include <vector>

#include "check.h"

namespace {

const octavo::Kernels* find_variant(const char* name) {
  for (const octavo::Kernels* const* each = octavo::compiled_kernels(); *each != nullptr; ++each) {
    if (std::strcmp((*each)->name, name) == 0) return *each;
  }
  return nullptr;
}

}  // namespace

int main(int argc, char** argv) {
  using namespace octavo;
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // what was said before a crash is seen
  std::vector<const Kernels*> variants;
  for (int i = 1; i < argc; ++i) {
    const Kernels* const found = find_variant(argv[i]);
    if (found == nullptr || !can_run(*found)) {
      std::printf("%s: %s\n", argv[i], found == nullptr ? "not in this build" : "cannot run on this machine");
      return 2;
    }
    variants.push_back(found);
  }
  if (argc == 1) {
    for (const Kernels* const* each = compiled_kernels(); *each != nullptr; ++each) {
      if (can_run(**each)) {
        variants.push_back(*each);
      } else {
        std::printf("%s: not run, this machine lacks it\n", (*each)->name);
      }
    }
  }
  test::test_threads();
  test::test_topology();
  for (const Kernels* kernels : variants) {
    const int passed_before = test::num_passed(), failed_before = test::num_failed();
    test::test_matmul(*kernels);
    test::test_row_ops(*kernels);
    test::test_attention(*kernels);
    test::test_sublayer(*kernels);
    test::test_lora(*kernels);
    test::test_sampling(*kernels);
    std::printf("%s: %d passed, %d failed\n", kernels->name, test::num_passed() - passed_before,
                test::num_failed() - failed_before);
  }
  std::printf("%d passed, %d failed\n", test::num_passed(), test::num_failed());
  return test::num_failed() == 0 ? 0 : 1;
}
