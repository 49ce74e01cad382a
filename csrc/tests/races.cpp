// Built without ThreadSanitizer's instrumentation: it is called from within.
#include "tests/races.h"

#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>

// There where the sanitizer is.
extern "C" {
__attribute__((weak)) void __tsan_acquire(void* address);
__attribute__((weak)) void __sanitizer_set_report_path(const char* path);
}

namespace hscache::test {
namespace {

constexpr int kRaceStatus = 66;  // the sanitizer's own

std::int64_t counted = 0;
std::int64_t uncounted = 0;
bool counting = false;

}  // namespace

bool sees_races() { return __tsan_acquire != nullptr; }

RaceCount::RaceCount() {
  counted = 0;
  counting = true;
  if (!sees_races()) return;
  __sanitizer_set_report_path("/dev/null");
  // Reports that were asked for must not decide what the process returns.
  static const int leaves_by_itself = on_exit(
      [](int status, void*) {
        std::fflush(nullptr);
        // _exit() would ask the sanitizer.
        syscall(SYS_exit_group, uncounted > 0 ? kRaceStatus : status);
      },
      nullptr);
  static_cast<void>(leaves_by_itself);
}

RaceCount::~RaceCount() {
  counting = false;
  if (sees_races()) __sanitizer_set_report_path("stderr");
}

std::int64_t RaceCount::seen() const { return counted; }

}  // namespace hscache::test

// Called by the sanitizer, with its own locks held.
extern "C" void __tsan_on_report(void*);
extern "C" void __tsan_on_report(void*) {
  using namespace hscache::test;
  ++(counting ? counted : uncounted);
}
// A race seen before is seen again: by default the second of a kind is not reported. Symbols would
// take a second for each report: TSAN_OPTIONS=symbolize=1 gives them where one is to be read.
extern "C" const char* __tsan_default_options();
extern "C" const char* __tsan_default_options() {
  return "suppress_equal_stacks=0:suppress_equal_addresses=0:symbolize=0";
}
