// A small test harness: TEST registers a function, CHECK reports and goes on, REQUIRE ends the
// test.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <typeinfo>

namespace hscache::test {

// `name` is subject.what_must_hold.
struct Registration {
  Registration(const char* name, void (*run)());
};

// Counts a failure of the running test and prints the first few. Thread-safe.
void report_failure(const char* file, int line, std::string_view what);

// The checks return whether it held, so that a loop over thousands of cases ends at the first that
// fails.
inline bool check(bool held, const char* file, int line, const char* what) {
  if (!held) report_failure(file, line, what);
  return held;
}

template <class A, class B>
bool check_equal(const A& a, const B& b, const char* file, int line, const char* what) {
  if (a == b) return true;
  std::ostringstream text;
  text << what << ": " << a << " and " << b;
  report_failure(file, line, text.str());
  return false;
}

// Whether `run(context)` throws exactly `error` (nothing derived from it) with `fragment` in its
// text.
bool check_throws(const std::type_info& error, std::string_view fragment, void (*run)(void*),
                  void* context, const char* file, int line);

template <class Run>
bool check_throws(const std::type_info& error, std::string_view fragment, Run run, const char* file,
                  int line) {
  return check_throws(
      error, fragment, [](void* self) { (*static_cast<Run*>(self))(); }, &run, file, line);
}

// Whether `run(context)` ends its process by abort() after printing `fragment`. It runs in a child.
bool check_dies(std::string_view fragment, void (*run)(void*), void* context, const char* file,
                int line);

template <class Run>
bool check_dies(std::string_view fragment, Run run, const char* file, int line) {
  return check_dies(fragment, [](void* self) { (*static_cast<Run*>(self))(); }, &run, file, line);
}

}  // namespace hscache::test

#define TEST(subject, name)                                                                    \
  static void subject##_##name();                                                              \
  static const hscache::test::Registration registration_##subject##_##name(#subject "." #name, \
                                                                           &subject##_##name); \
  static void subject##_##name()

#define CHECK(condition) \
  hscache::test::check(static_cast<bool>(condition), __FILE__, __LINE__, #condition)
#define CHECK_EQ(a, b) hscache::test::check_equal((a), (b), __FILE__, __LINE__, #a " == " #b)
#define CHECK_THROWS(Error, fragment, ...) \
  hscache::test::check_throws(typeid(Error), fragment, [&] { __VA_ARGS__; }, __FILE__, __LINE__)
#define CHECK_DIES(fragment, ...) \
  hscache::test::check_dies(fragment, [&] { __VA_ARGS__; }, __FILE__, __LINE__)
#define REQUIRE(condition) \
  if (!CHECK(condition)) throw std::runtime_error("the test cannot go on")
