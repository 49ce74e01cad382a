// What a child process sees of what its parent has.
#pragma once

#include <functional>
#include <string>

namespace hscache::test {

// Runs `body` in a forked child. Returns its answer, "threw: " and the text of its exception, or
// "died" (with a hang counted as one).
std::string in_child(const std::function<std::string()>& body);

}  // namespace hscache::test
