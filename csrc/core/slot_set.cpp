#include "core/slot_set.h"

#include <algorithm>
#include <bit>
#include <cstddef>

namespace hscache {
namespace {

constexpr std::int64_t kWord = 64;

std::size_t word_of(std::int64_t place) { return static_cast<std::size_t>(place / kWord); }
// The bits of a word from a place on.
std::uint64_t bits_from(std::int64_t place) { return ~std::uint64_t{0} << (place % kWord); }
std::uint64_t bit_of(std::int64_t place) { return std::uint64_t{1} << (place % kWord); }

// Calls `change(word, bits)` for each word that has a place from `begin` to before `end`.
template <class Change>
void for_each_word(std::vector<std::uint64_t>& words, std::int64_t begin, std::int64_t end,
                   Change change) {
  for (std::int64_t at = begin; at < end; at = (at / kWord + 1) * kWord) {
    std::uint64_t bits = bits_from(at);
    if (end < (at / kWord + 1) * kWord) bits &= ~bits_from(end);
    change(words[word_of(at)], bits);
  }
}

}  // namespace

SlotSet::SlotSet(std::int64_t size) : size_(size) {
  do {
    size = (size + kWord - 1) / kWord;
    levels_.emplace_back(static_cast<std::size_t>(std::max<std::int64_t>(size, 1)), 0);
  } while (size > 1);
}

bool SlotSet::contains(std::int64_t slot) const {
  return (levels_[0][word_of(slot)] & bit_of(slot)) != 0;
}

void SlotSet::insert(std::int64_t slot) {
  ++count_;
  for (auto& words : levels_) {
    const bool was_empty = words[word_of(slot)] == 0;
    words[word_of(slot)] |= bit_of(slot);
    if (!was_empty) return;
    slot /= kWord;
  }
}

void SlotSet::erase(std::int64_t slot) {
  --count_;
  for (auto& words : levels_) {
    words[word_of(slot)] &= ~bit_of(slot);
    if (words[word_of(slot)] != 0) return;
    slot /= kWord;
  }
}

void SlotSet::insert(std::int64_t begin, std::int64_t end) {
  if (begin >= end) return;
  for_each_word(levels_[0], begin, end, [this](std::uint64_t& word, std::uint64_t bits) {
    count_ += std::popcount(bits & ~word);
    word |= bits;
  });
  for (std::size_t level = 1; level < levels_.size(); ++level) {
    begin /= kWord;
    end = (end - 1) / kWord + 1;
    for_each_word(levels_[level], begin, end,
                  [](std::uint64_t& word, std::uint64_t bits) { word |= bits; });
  }
}

void SlotSet::erase(std::int64_t begin, std::int64_t end) {
  if (begin >= end) return;
  for_each_word(levels_[0], begin, end, [this](std::uint64_t& word, std::uint64_t bits) {
    count_ -= std::popcount(bits & word);
    word &= ~bits;
  });
  for (std::size_t level = 1; level < levels_.size(); ++level) {
    // The outermost words may have others left.
    const auto& below = levels_[level - 1];
    begin = begin / kWord + (below[word_of(begin)] != 0 ? 1 : 0);
    end = (end - 1) / kWord + (below[word_of(end - 1)] != 0 ? 0 : 1);
    if (begin >= end) return;
    for_each_word(levels_[level], begin, end,
                  [](std::uint64_t& word, std::uint64_t bits) { word &= ~bits; });
  }
}

std::int64_t SlotSet::next(std::int64_t from) const {
  // Up, until a word has a bit at or behind the place; then down to that bit's first number.
  for (std::size_t level = 0; level < levels_.size(); ++level) {
    const auto& words = levels_[level];
    if (word_of(from) >= words.size()) return size_;
    const std::uint64_t behind = words[word_of(from)] & bits_from(from);
    if (behind != 0) {
      std::int64_t place = from / kWord * kWord + std::countr_zero(behind);
      while (level > 0)
        place = place * kWord + std::countr_zero(levels_[--level][static_cast<std::size_t>(place)]);
      return place;
    }
    from = from / kWord + 1;
  }
  return size_;
}

std::int64_t SlotSet::next_absent(std::int64_t from) const {
  while (from < size_) {
    const std::uint64_t absent = ~levels_[0][word_of(from)] & bits_from(from);
    if (absent != 0) return std::min(size_, from / kWord * kWord + std::countr_zero(absent));
    from = (from / kWord + 1) * kWord;
  }
  return size_;
}

}  // namespace hscache
