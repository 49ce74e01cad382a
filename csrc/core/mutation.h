// Faults that the tests put into the code on purpose, to see that they are caught.
//
// Every wait that keeps an order has a name here. In the test build `mutated(name)` is true while a
// test has chosen that name; elsewhere it is false at compile time and costs nothing.
#pragma once

#include <string_view>

namespace hscache {

#if defined(HSCACHE_MUTATIONS)
// Chooses the one fault that is in; empty for none. Not thread-safe.
void choose_mutation(std::string_view name);
bool mutated(std::string_view name);
#else
constexpr bool mutated(std::string_view) { return false; }
#endif

}  // namespace hscache
