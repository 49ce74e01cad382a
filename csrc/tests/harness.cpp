#include "tests/harness.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace hscache::test {
namespace {

constexpr int kPrinted = 5;  // failures of one test that are worth reading

struct Test {
  std::string name;
  void (*run)();
};

// Registered before main() runs, in an order that is not ours to choose.
std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

std::mutex failures_mutex;
int failures = 0;

}  // namespace

Registration::Registration(const char* name, void (*run)()) { tests().push_back({name, run}); }

void report_failure(const char* file, int line, std::string_view what) {
  const std::lock_guard lock(failures_mutex);
  if (++failures > kPrinted) return;
  std::printf("  %s:%d: %.*s\n", file, line, static_cast<int>(what.size()), what.data());
}

bool check_throws(const std::type_info& error, std::string_view fragment, void (*run)(void*),
                  void* context, const char* file, int line) {
  std::string instead = "threw nothing";
  try {
    run(context);
  } catch (const std::exception& thrown) {
    const std::string text = thrown.what();
    if (typeid(thrown) == error && text.find(fragment) != std::string::npos) return true;
    instead = std::string("threw ") + typeid(thrown).name() + ": " + text;
  }
  report_failure(file, line, instead);
  return false;
}

bool check_dies(std::string_view fragment, void (*run)(void*), void* context, const char* file,
                int line) {
  int ends[2];
  if (pipe(ends) != 0) throw std::runtime_error("no pipe for a child");
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], STDERR_FILENO);
    run(context);
    _exit(0);
  }
  close(ends[1]);
  std::string printed;
  char part[512];
  for (ssize_t got = 0; (got = read(ends[0], part, sizeof(part))) > 0;) {
    printed.append(part, static_cast<std::size_t>(got));
  }
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  const bool aborted = WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
  if (aborted && printed.find(fragment) != std::string::npos) return true;
  report_failure(
      file, line,
      (aborted ? "died and printed: "
               : "did not abort (status " + std::to_string(status) + "), but printed: ") +
          printed);
  return false;
}

}  // namespace hscache::test

// Runs the tests whose name begins with an argument, or all of them where there is none.
int main(int count, char** arguments) {
  using namespace hscache::test;
  int run = 0;
  int failed = 0;
  for (const Test& test : tests()) {
    bool chosen = count < 2;
    for (int i = 1; i < count; ++i) chosen |= test.name.starts_with(arguments[i]);
    if (!chosen) continue;
    ++run;
    failures = 0;
    try {
      test.run();
    } catch (const std::exception& error) {
      report_failure(test.name.c_str(), 0, std::string("ended early: ") + error.what());
    }
    std::printf("%s %s\n", failures == 0 ? "ok    " : "FAILED", test.name.c_str());
    std::fflush(stdout);
    failed += failures > 0;
  }
  std::printf("%d tests, %d failed\n", run, failed);
  return failed > 0 || run == 0;
}
