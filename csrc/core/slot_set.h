// A set of slot numbers that finds its next member in a handful of steps.
#pragma once

#include <cstdint>
#include <vector>

namespace hscache {

// A subset of the numbers below `size`: one bit for each, above them one bit for each word that is
// not empty, and so on up to a single word. A number takes a step for each level, of which a
// billion numbers need five. Not thread-safe.
class SlotSet {
 public:
  explicit SlotSet(std::int64_t size);

  bool contains(std::int64_t slot) const;
  // Of a number that is not there, and of one that is.
  void insert(std::int64_t slot);
  void erase(std::int64_t slot);
  // Of all from `begin` to before `end`, whichever are there; 64 a step.
  void insert(std::int64_t begin, std::int64_t end);
  void erase(std::int64_t begin, std::int64_t end);
  std::int64_t count() const { return count_; }

  // The first member at or behind `from`; `size` where there is none.
  std::int64_t next(std::int64_t from) const;
  // The first number at or behind `from` that is no member, 64 a step; `size` where there is none.
  std::int64_t next_absent(std::int64_t from) const;

 private:
  const std::int64_t size_;
  std::int64_t count_ = 0;
  std::vector<std::vector<std::uint64_t>> levels_;  // the numbers themselves first
};

}  // namespace hscache
