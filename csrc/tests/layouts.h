// Random paged layouts, and the reference that every gather is held against.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "core/paged_view.h"

namespace hscache::test {

// Draws the same on every machine, so that a seed that found something finds it again.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t bits();
  // From `low` to `high`, both included.
  std::int64_t in(std::int64_t low, std::int64_t high);
  bool chance(int percent) { return in(1, 100) <= percent; }

  template <class T>
  T pick(std::initializer_list<T> choices) {
    return choices.begin()[in(0, static_cast<std::int64_t>(choices.size()) - 1)];
  }
  template <class T>
  void shuffle(std::vector<T>& items) {
    for (std::size_t i = items.size(); i > 1; --i) {
      std::swap(items[i - 1], items[static_cast<std::size_t>(bits() % i)]);
    }
  }

 private:
  std::uint64_t state_;
};

// Memory with a known byte in front of, behind and between what is written on purpose. Starts
// `misaligned` bytes after an address that is divisible by 16.
class Buffer {
 public:
  explicit Buffer(std::int64_t bytes, std::int64_t misaligned = 0);

  std::byte* data() { return memory_.data() + begin_; }
  // Rows that differ from each other wherever they lie.
  void fill();
  bool operator==(const Buffer& other) const { return memory_ == other.memory_; }

 private:
  std::vector<std::byte> memory_;
  std::size_t begin_;
};

// A paged cache, a block table, a token range and where its rows go.
struct Layout {
  PagedView paged;
  std::int64_t paged_bytes = 0;
  std::vector<std::int64_t> block_ids;
  std::int64_t start = 0;
  std::int64_t length = 0;
  RowsView rows;
  std::int64_t rows_bytes = 0;
  std::int64_t misaligned = 0;

  std::string text() const;
};

// A layout whose every address is divisible by `unit` (1, 2, 4, 8 or 16), of rows of at most
// `max_row_units` such units.
Layout draw_layout(Random& random, std::int64_t unit, std::int64_t max_row_units);

// The gather one row at a time, in its own arithmetic.
void naive_gather(const Layout& layout, const std::byte* paged, std::byte* rows);
// And the scatter.
void naive_scatter(const Layout& layout, std::byte* paged, const std::byte* rows);

}  // namespace hscache::test
