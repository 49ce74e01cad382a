// Data races, as ThreadSanitizer reports them. Elsewhere there are none to be seen.
#pragma once

#include <cstdint>

namespace hscache::test {

// Whether this is a build that sees them.
bool sees_races();

// While it lives races are counted instead of printed. A race that nobody counts fails the
// process.
class RaceCount {
 public:
  RaceCount();
  ~RaceCount();
  RaceCount(const RaceCount&) = delete;
  RaceCount& operator=(const RaceCount&) = delete;

  std::int64_t seen() const;
};

}  // namespace hscache::test
