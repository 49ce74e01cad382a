// ChunkTree beside a model so simple that it looks at everything each time.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "core/chunk_tree.h"
#include "tests/harness.h"
#include "tests/held_transfer.h"
#include "tests/layouts.h"

namespace hscache::test {
namespace {

using Id = ChunkTree::Id;
using Ids = std::vector<Id>;
using Slots = std::vector<std::int64_t>;
using Layers = std::vector<std::int64_t>;
using Transfers = std::vector<std::shared_ptr<HeldTransfer>>;

constexpr Id kNone = ChunkTree::kNone;

// Two formats share a pool, a third has its own.
constexpr int kFormats = 3;
constexpr int pool_of(int format) { return format == 2; }
constexpr std::int64_t kSlots[] = {20, 6};
constexpr int kKeys = 14;
constexpr std::int64_t kAllLayers = 3;

class Play {
 public:
  explicit Play(std::uint64_t seed) : random_(seed) {
    for (const std::int64_t slots : kSlots)
      pools_.push_back(std::make_shared<SlotPool>(std::make_shared<Arena>(slots * 64), 64));
    for (int format = 0; format < kFormats; ++format) {
      tree_.add_format(pools_[static_cast<std::size_t>(pool_of(format))]);
    }
    for (int key = 0; key < kKeys; ++key) {
      parents_.push_back(key % 5 == 0 ? -1 : static_cast<int>(random_.in(0, key - 1)));
    }
  }

  // Returns whether everything was as in the model.
  bool run(int operations) {
    for (int i = 0; i < operations; ++i) {
      operate();
      follow();
      if (!check_all()) return false;
    }
    return end();
  }

 private:
  struct Fill {
    std::vector<std::int64_t> layers;
    Transfers transfers;
  };
  struct Row {
    int format = 0;
    std::int64_t slot = 0;
    bool whole = false;
  };
  struct Chunk {
    Id id = kNone;
    std::map<std::int64_t, Row> rows;
    std::vector<Fill> fills;  // that settle() has not seen ended
    std::vector<Fill> why;
    int pins = 0;
    int last_used = 0;
    bool busy() const { return pins > 0 || !fills.empty(); }
  };
  struct Retired {
    int format = 0;
    Slots slots;
    Transfers transfers;
  };

  static bool pending(const Transfers& transfers) {
    return std::ranges::any_of(transfers, [](const auto& t) { return t->pending(); });
  }
  static ChunkTree::Tickets tickets_of(const Transfers& transfers) {
    ChunkTree::Tickets tickets;
    for (const auto& transfer : transfers) tickets.push_back(transfer->ticket());
    return tickets;
  }

  // --- the model ---

  bool reachable(int key) const {
    const int parent = parents_[static_cast<std::size_t>(key)];
    return parent < 0 || (chunks_.contains(parent) && reachable(parent));
  }
  bool is_leaf(int key) const {
    return std::ranges::none_of(chunks_, [&](const auto& entry) {
      return parents_[static_cast<std::size_t>(entry.first)] == key;
    });
  }
  int victim() const {
    std::optional<std::tuple<bool, int, int>> first;
    for (const auto& [key, chunk] : chunks_) {
      if (chunk.busy() || !is_leaf(key)) continue;
      const std::tuple place{reachable(key), chunk.last_used, key};
      if (!first || place < *first) first = place;
    }
    return first ? std::get<2>(*first) : -1;
  }
  std::set<std::int64_t> used(int pool) const {
    std::set<std::int64_t> slots;
    const auto add = [&](int format, std::int64_t slot) {
      if (pool_of(format) == pool) CHECK(slots.insert(slot).second);
    };
    const auto add_rows = [&](const Chunk& chunk) {
      for (const auto& [layer, row] : chunk.rows) add(row.format, row.slot);
    };
    for (const auto& [key, chunk] : chunks_) add_rows(chunk);
    for (const Chunk& chunk : doomed_) add_rows(chunk);
    for (const Retired& retired : retired_) {
      for (const std::int64_t slot : retired.slots) add(retired.format, slot);
    }
    for (int format = 0; format < kFormats; ++format) {
      for (const std::int64_t slot : own_[format]) add(format, slot);
    }
    return slots;
  }
  void model_remove(int key) {
    const auto found = chunks_.find(key);
    if (found->second.busy()) doomed_.push_back(std::move(found->second));
    chunks_.erase(found);
  }
  void model_settle() {
    const auto settle = [](Chunk& chunk) {
      bool failed = false;
      std::erase_if(chunk.fills, [&](const Fill& fill) {
        if (pending(fill.transfers)) return false;
        if (std::ranges::all_of(fill.transfers, [](const auto& t) { return t->done(); })) {
          for (const std::int64_t layer : fill.layers) chunk.rows.at(layer).whole = true;
        } else {
          failed = true;
          if (chunk.pins > 0) chunk.why.push_back(fill);
        }
        return true;
      });
      return failed;
    };
    for (Chunk& chunk : doomed_) settle(chunk);
    std::vector<int> failed;
    for (auto& [key, chunk] : chunks_) {
      if (settle(chunk)) failed.push_back(key);
    }
    for (const int key : failed) model_remove(key);
    std::erase_if(doomed_, [](const Chunk& chunk) { return !chunk.busy(); });
    std::erase_if(retired_, [](const Retired& retired) { return !pending(retired.transfers); });
  }
  void touch(Chunk& chunk) { chunk.last_used = ++clock_; }

  // --- keys, as the index has them ---

  Id id_of(int key) const { return ids_.contains(key) ? ids_.at(key) : kNone; }
  void name(int key, Id id) {
    ids_[key] = id;
    CHECK(keys_.emplace(id, key).second);  // the number is nobody else's
  }
  void follow() {
    for (const auto& [from, to] : tree_.take_changes()) {
      const auto named = keys_.find(from);
      if (!CHECK(named != keys_.end())) return;
      const int key = named->second;
      keys_.erase(named);
      ids_.erase(key);
      if (to != kNone) name(key, to);
    }
  }

  // --- what is done ---

  void operate() {
    switch (random_.in(0, 17)) {
      case 0:
      case 1:
      case 2:
        return add();
      case 3:
      case 4:
      case 5:
        return fill();
      case 6:
        return remove();
      case 7:
        if (random_.chance(10)) remove_all();
        return;
      case 8:
      case 9:
        return end_transfer();
      case 10:
        tree_.settle();
        return model_settle();
      case 11:
        return pin();
      case 12:
        return pin_prefix();
      case 13:
      case 14:
        return unpin();
      case 15:
        return evict();
      case 16:
        return allocate();
      default:
        return retire();
    }
  }

  int any_key() { return static_cast<int>(random_.in(0, kKeys - 1)); }
  Transfers any_transfers() {
    Transfers chosen;
    for (std::int64_t i = random_.in(0, 3); i > 0; --i) {
      if (transfers_.empty() || random_.chance(40)) {
        transfers_.push_back(std::make_shared<HeldTransfer>());
      }
      const auto last = std::ssize(transfers_) - 1;
      chosen.push_back(transfers_[static_cast<std::size_t>(
          random_.in(std::max<std::int64_t>(0, last - 5), last))]);
    }
    return chosen;
  }
  // Some slots of a pool, own or what can be had.
  std::int64_t take_slot(int format) {
    Slots& own = own_[format];
    if (own.empty()) {
      auto slots = pools_[static_cast<std::size_t>(pool_of(format))]->allocate(1);
      if (!slots) return -1;
      return slots->front();
    }
    const std::int64_t slot = own.back();
    own.pop_back();
    return slot;
  }

  void add() {
    const int key = any_key();
    const int parent_key = parents_[static_cast<std::size_t>(key)];
    if (chunks_.contains(key)) {
      CHECK_THROWS(std::invalid_argument, "is there already", tree_.add(id_of(key), kNone));
      return;
    }
    Id parent = kNone;
    if (parent_key >= 0) {
      parent = id_of(parent_key);
      if (parent == kNone) name(parent_key, parent = tree_.add_absent());
    }
    const Id before = id_of(key);
    const Id id = tree_.add(before, parent);
    CHECK(before == kNone || before == id);
    if (before == kNone) name(key, id);
    Chunk& chunk = chunks_[key];
    chunk.id = id;
    touch(chunk);
  }

  void fill() {
    const int key = any_key();
    const int format = static_cast<int>(random_.in(0, kFormats - 1));
    const auto transfers = any_transfers();
    std::vector<ChunkTree::LayerSlot> added;
    Fill fill{{}, transfers};
    bool refused = !chunks_.contains(key);
    for (std::int64_t layer = 0; layer < kAllLayers; ++layer) {
      if (!random_.chance(50)) continue;
      const bool there = !refused && chunks_.contains(key) && chunks_[key].rows.contains(layer);
      if (there && !random_.chance(10)) continue;
      const std::int64_t slot = take_slot(format);
      if (slot < 0) break;
      refused |= there;
      added.push_back({layer, slot});
      fill.layers.push_back(layer);
    }
    random_.shuffle(added);
    if (refused) {
      const Id id = id_of(key);
      CHECK_THROWS(std::invalid_argument,
                   id != kNone && tree_.present(id) ? "already" : "is not there",
                   tree_.fill(id, format, added, tickets_of(transfers)));
      for (const auto& entry : added) own_[format].push_back(entry.slot);
      return;
    }
    Chunk& chunk = chunks_[key];
    tree_.fill(chunk.id, format, added, tickets_of(transfers));
    for (const auto& [layer, slot] : added) chunk.rows[layer] = {format, slot, false};
    chunk.fills.push_back(std::move(fill));
  }

  void remove() {
    const int key = any_key();
    if (!chunks_.contains(key)) {
      CHECK_THROWS(std::invalid_argument, "is not there", tree_.remove(id_of(key)));
      return;
    }
    tree_.remove(id_of(key));
    model_remove(key);
  }

  void remove_all() {
    tree_.remove_all();
    while (!chunks_.empty()) model_remove(chunks_.begin()->first);
  }

  void end_transfer() {
    if (transfers_.empty()) return;
    const auto chosen = transfers_.begin() + random_.in(0, std::ssize(transfers_) - 1);
    (*chosen)->end(random_.chance(70));
    if (random_.chance(70)) transfers_.erase(chosen);
  }

  void pin() {
    if (!doomed_.empty() && random_.chance(30)) {
      Chunk& chunk = doomed_[static_cast<std::size_t>(random_.in(0, std::ssize(doomed_) - 1))];
      if (chunk.pins == 0) {
        CHECK_THROWS(std::invalid_argument, "is not there", tree_.pin(chunk.id));
        return;
      }
      tree_.pin(chunk.id);
      ++chunk.pins;
      return;
    }
    const int key = any_key();
    if (!chunks_.contains(key)) {
      const Id id = id_of(key);
      if (id == kNone) return;
      CHECK_THROWS(std::invalid_argument, "is not there", tree_.pin(id));
      return;
    }
    tree_.pin(id_of(key));
    ++chunks_[key].pins;
    touch(chunks_[key]);
  }

  Layers any_layers() {
    Layers layers;
    for (std::int64_t layer = 0; layer < kAllLayers; ++layer) {
      if (random_.chance(40)) layers.push_back(layer);
    }
    return layers;
  }

  void pin_prefix() {
    std::vector<int> path;
    for (int key = any_key(); key >= 0; key = parents_[static_cast<std::size_t>(key)]) {
      path.insert(path.begin(), key);
    }
    const Layers layers = any_layers();
    Ids ids;
    std::size_t expected = 0;
    bool whole = true;
    for (const int key : path) {
      ids.push_back(id_of(key));
      whole = whole && chunks_.contains(key);
      for (const std::int64_t layer : layers) {
        whole = whole && chunks_[key].rows.contains(layer) && chunks_[key].rows[layer].whole;
      }
      if (!whole) continue;
      ++expected;
      ++chunks_[key].pins;
      touch(chunks_[key]);
    }
    CHECK_EQ(tree_.pin_prefix(ids, layers), expected);
  }

  void unpin() {
    std::vector<Chunk*> pins;  // once for each
    for (auto& [key, chunk] : chunks_)
      pins.insert(pins.end(), static_cast<std::size_t>(chunk.pins), &chunk);
    for (Chunk& chunk : doomed_)
      pins.insert(pins.end(), static_cast<std::size_t>(chunk.pins), &chunk);
    random_.shuffle(pins);
    if (!random_.chance(30)) pins.resize(pins.size() / 2);
    Ids ids;
    for (const Chunk* chunk : pins) ids.push_back(chunk->id);
    if (random_.chance(20)) {
      Ids odd = ids;
      Id bad = random_.pick({kNone, Id{1'000}, id_of(any_key())});
      const bool held = std::ranges::any_of(
          chunks_, [&](const auto& e) { return e.second.id == bad && e.second.pins > 0; });
      if (!held) {
        odd.insert(odd.begin() + random_.in(0, std::ssize(odd)), bad);
        bool threw = false;
        try {
          tree_.unpin(odd);
        } catch (const std::logic_error&) {
          threw = true;
        }
        CHECK(threw);
        return;
      }
    }
    tree_.unpin(ids);
    for (Chunk* chunk : pins) --chunk->pins;
    std::erase_if(doomed_, [](const Chunk& chunk) { return !chunk.busy(); });
  }

  void evict() {
    const int key = victim();
    const Id expected = key < 0 ? kNone : id_of(key);
    CHECK_EQ(tree_.evict(), expected);
    if (key >= 0) model_remove(key);
    evicted_ += key >= 0;
  }

  void allocate() {
    const int format = static_cast<int>(random_.in(0, kFormats - 1));
    const int pool = pool_of(format);
    const std::int64_t count = random_.chance(5) ? random_.in(0, 30) : random_.in(0, 6);
    const auto slots = tree_.allocate(format, count);
    bool expected = count <= kSlots[pool];
    while (expected && kSlots[pool] - std::ssize(used(pool)) < count) {
      const int key = victim();
      if (key < 0) {
        expected = false;
        break;
      }
      model_remove(key);
      ++evicted_;
    }
    if (!CHECK_EQ(slots.has_value(), expected) || !slots) return;
    CHECK_EQ(std::ssize(*slots), count);
    const std::set<std::int64_t> taken = used(pool);
    std::int64_t longest = 0;
    std::int64_t run = 0;
    for (std::int64_t slot = 0; slot < kSlots[pool]; ++slot) {
      run = taken.contains(slot) ? 0 : run + 1;
      longest = std::max(longest, run);
    }
    for (std::size_t i = 0; i < slots->size(); ++i) {
      CHECK(!taken.contains((*slots)[i]));
      CHECK(longest < count || (*slots)[i] == slots->front() + static_cast<std::int64_t>(i));
    }
    own_[format].insert(own_[format].end(), slots->begin(), slots->end());
  }

  void retire() {
    const int format = static_cast<int>(random_.in(0, kFormats - 1));
    Slots& own = own_[format];
    Retired retired{format, {}, any_transfers()};
    for (std::int64_t i = random_.in(0, 8); i > 0 && !own.empty(); --i) {
      retired.slots.push_back(own.back());
      own.pop_back();
    }
    tree_.retire(format, retired.slots, tickets_of(retired.transfers));
    retired_.push_back(std::move(retired));
    model_settle();
  }

  // --- what must hold ---

  bool check_chunk(const Chunk& chunk, bool present) {
    bool fine = CHECK_EQ(tree_.present(chunk.id), present);
    Layers lacking;
    const Layers all = {0, 1, 2};
    for (const std::int64_t layer : all) {
      const auto row = chunk.rows.find(layer);
      if (row == chunk.rows.end()) {
        lacking.push_back(layer);
        fine &= CHECK(!tree_.holds(chunk.id, layer));
        continue;
      }
      fine &= CHECK_EQ(tree_.holds(chunk.id, layer), present && row->second.whole);
      const auto runs = tree_.runs(Ids{chunk.id}, layer);
      fine &= CHECK(runs.size() == 1 && runs[0].format == row->second.format &&
                    runs[0].slots == Slots{row->second.slot});
      std::set<Ticket*> expected;
      for (const auto* fills : {&chunk.fills, &chunk.why}) {
        for (const Fill& fill : *fills) {
          if (std::ranges::find(fill.layers, layer) == fill.layers.end()) continue;
          for (const auto& transfer : fill.transfers) expected.insert(transfer->ticket().get());
        }
      }
      const auto found = tree_.tickets(Ids{chunk.id}, Layers{layer});
      fine &= CHECK_EQ(found.size(), expected.size());
      for (const auto& ticket : found) fine &= CHECK(expected.contains(ticket.get()));
    }
    return fine && CHECK(tree_.missing(chunk.id, all) == (present ? lacking : all));
  }

  bool check_all() {
    bool fine =
        CHECK_EQ(tree_.size(), std::ssize(chunks_)) && CHECK_EQ(tree_.num_evicted(), evicted_);
    for (int pool = 0; pool < 2; ++pool) {
      fine &=
          CHECK_EQ(pools_[static_cast<std::size_t>(pool)]->stats().used, std::ssize(used(pool)));
    }
    std::set<Id> numbers;
    for (const auto& [key, id] : ids_) {
      fine &= CHECK(numbers.insert(id).second);
      // A key that is absent has a number only for those that hang on it.
      if (!chunks_.contains(key)) fine &= CHECK(!is_leaf(key)) && CHECK(!tree_.present(id));
    }
    for (const auto& [key, chunk] : chunks_) {
      fine &= CHECK_EQ(id_of(key), chunk.id);
      const int parent = parents_[static_cast<std::size_t>(key)];
      fine &= CHECK(parent < 0 || ids_.contains(parent));
      fine = fine && check_chunk(chunk, true);
    }
    for (const Chunk& chunk : doomed_) {
      fine &= CHECK(numbers.insert(chunk.id).second);
      fine = fine && check_chunk(chunk, false);
    }
    return fine;
  }

  // All goes in the right order, and nothing is lost.
  bool end() {
    for (const auto& transfer : transfers_) transfer->end(true);
    for (int format = 0; format < kFormats; ++format) {
      tree_.retire(format, std::exchange(own_[format], {}), {});
    }
    model_settle();
    Ids pins;
    for (auto& [key, chunk] : chunks_) {
      pins.insert(pins.end(), static_cast<std::size_t>(std::exchange(chunk.pins, 0)), chunk.id);
    }
    for (Chunk& chunk : doomed_) {
      pins.insert(pins.end(), static_cast<std::size_t>(std::exchange(chunk.pins, 0)), chunk.id);
    }
    tree_.unpin(pins);
    doomed_.clear();
    follow();
    if (!check_all()) return false;
    while (!chunks_.empty()) {
      evict();
      follow();
      if (!check_all()) return false;
    }
    return CHECK(ids_.empty()) && CHECK_EQ(tree_.evict(), kNone);
  }

  Random random_;
  std::vector<std::shared_ptr<SlotPool>> pools_;
  ChunkTree tree_;
  std::vector<int> parents_;  // by key
  std::map<int, Id> ids_;
  std::map<Id, int> keys_;
  std::map<int, Chunk> chunks_;  // by key
  std::vector<Chunk> doomed_;
  std::vector<Retired> retired_;
  Slots own_[kFormats];
  Transfers transfers_;
  int clock_ = 0;
  std::int64_t evicted_ = 0;
};

}  // namespace

// HSCACHE_SEED=N runs that one only.
TEST(chunk_tree, any_sequence_of_operations_does_what_the_model_does) {
  const char* only = std::getenv("HSCACHE_SEED");
  const std::uint64_t first = only == nullptr ? 1 : std::strtoull(only, nullptr, 10);
  const std::uint64_t last = only == nullptr ? 2'000 : first;
  for (std::uint64_t seed = first; seed <= last; ++seed) {
    if (!Play(seed).run(200)) {
      CHECK_EQ(seed, 0U);
      return;
    }
  }
}

}  // namespace hscache::test
