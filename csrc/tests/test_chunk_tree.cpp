#include "core/chunk_tree.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/transfer_engine.h"
#include "tests/harness.h"
#include "tests/layouts.h"
#include "tests/requests.h"
#include "tests/scripted_runtime.h"

namespace hscache::test {
namespace {

using Id = ChunkTree::Id;
using Ids = std::vector<Id>;
using Slots = std::vector<std::int64_t>;
using Layers = std::vector<std::int64_t>;
using Changes = std::vector<std::pair<Id, Id>>;
using Ticket = hscache::Ticket;

constexpr Id kNone = ChunkTree::kNone;

// A transfer that ends when the test says so.
class Transfer {
 public:
  Transfer() {
    const Request request(cache(), {0}, 0, {1});
    // Enqueues nothing before end(), so that the request need not live until then.
    rows_ = request.destinations().front();
    TransferRequest gather = request.gather();
    gather.pieces.front().layers.front() = rows_.data();
    ticket_ = engine_.submit(std::move(gather), Backpressure::kWait);
  }

  const std::shared_ptr<Ticket>& ticket() const { return ticket_; }
  bool pending() const { return ticket_->state() == Ticket::State::kPending; }
  bool done() const { return ticket_->state() == Ticket::State::kDone; }

  void end(bool well) {
    if (!well) ticket_->cancel();
    while (pending()) {
      engine_.poll();
      script_->run_all();
    }
  }

 private:
  static Cache& cache() {
    static Cache shared;
    return shared;
  }

  std::vector<std::byte> rows_;
  std::shared_ptr<Script> script_ = std::make_shared<Script>();
  TransferEngine engine_{script_->runtime(), {}, /*threaded=*/false};
  std::shared_ptr<Ticket> ticket_;
};

std::shared_ptr<SlotPool> make_pool(std::int64_t slots) {
  return std::make_shared<SlotPool>(std::make_shared<Arena>(slots * 64), 64);
}

// A tree of one format.
struct Tree : ChunkTree {
  explicit Tree(std::int64_t slots = 32) : slots(make_pool(slots)) { add_format(this->slots); }

  // A chunk whose layers are whole.
  Id put(Id parent, const Layers& layers = {0}, Id id = kNone) {
    const Id added = add(id, parent);
    fill_with(added, layers, {});
    settle();
    return added;
  }
  // A prefix of `count` chunks, the first first.
  Ids chain(std::size_t count) {
    Ids ids;
    while (ids.size() < count) ids.push_back(put(ids.empty() ? kNone : ids.back()));
    return ids;
  }
  void fill_with(Id id, const Layers& layers, const Tickets& tickets) {
    const Slots taken = slots->allocate(std::ssize(layers)).value();
    std::vector<LayerSlot> added;
    for (std::size_t i = 0; i < layers.size(); ++i) added.push_back({layers[i], taken[i]});
    fill(id, 0, added, tickets);
  }
  // In the order in which they go.
  Ids evict_all() {
    Ids gone;
    for (Id id = evict(); id != kNone; id = evict()) gone.push_back(id);
    return gone;
  }
  void drop_pin(Id id) { unpin(Ids{id}); }
  std::size_t pinned(const Ids& ids, const Layers& layers) { return pin_prefix(ids, layers); }
  Tickets tickets_of(const Ids& ids, const Layers& layers) const { return tickets(ids, layers); }
  std::int64_t used() const { return slots->stats().used; }

  std::shared_ptr<SlotPool> slots;
};

Slots slots_of(const ChunkTree& tree, Id id, std::int64_t layer) {
  return tree.runs(Ids{id}, layer).at(0).slots;
}

}  // namespace

// --- which one goes ------------------------------------------------------------------------------

TEST(chunk_tree, leaves_go_before_what_they_hang_on) {
  Tree tree;
  const Ids ids = tree.chain(3);
  CHECK(tree.evict_all() == Ids({ids[2], ids[1], ids[0]}));
  CHECK_EQ(tree.size(), 0);
  CHECK_EQ(tree.used(), 0);
  CHECK_EQ(tree.num_evicted(), 3);
}

TEST(chunk_tree, the_least_recently_used_leaf_goes_first) {
  Tree tree;
  const Id a = tree.put(kNone), b = tree.put(kNone), c = tree.put(kNone);
  CHECK_EQ(tree.pinned({a}, {0}), 1U);
  tree.drop_pin(a);
  CHECK(tree.evict_all() == Ids({b, c, a}));
}

TEST(chunk_tree, what_cannot_be_reached_goes_before_all_others) {
  Tree tree;
  const Id other = tree.put(kNone);
  const Ids ids = tree.chain(3);
  tree.remove(ids[0]);
  CHECK(tree.evict_all() == Ids({ids[2], ids[1], other}));
}

TEST(chunk_tree, it_can_be_reached_again_when_its_predecessor_is_back) {
  Tree tree;
  const Id other = tree.put(kNone);
  const Ids ids = tree.chain(3);
  tree.remove(ids[0]);
  CHECK_EQ(tree.put(kNone, {0}, ids[0]), ids[0]);
  CHECK(tree.evict_all() == Ids({other, ids[2], ids[1], ids[0]}));
}

TEST(chunk_tree, a_chunk_may_come_before_its_predecessor) {
  Tree tree;
  const Id other = tree.put(kNone);
  const Id parent = tree.add_absent();
  const Id child = tree.put(parent);
  CHECK(!tree.present(parent));
  CHECK_EQ(tree.size(), 2);
  CHECK_EQ(tree.evict(), child);
  CHECK(tree.take_changes() == Changes({{parent, kNone}, {child, kNone}}));
  const Id again = tree.add_absent();
  const Id hanging = tree.put(again);
  tree.put(kNone, {0}, again);
  CHECK(tree.evict_all() == Ids({other, hanging, again}));
}

TEST(chunk_tree, pinned_chunks_stay_and_what_they_hang_on) {
  Tree tree;
  const Ids ids = tree.chain(3);
  tree.pin(ids[1]);
  tree.pin(ids[1]);
  CHECK(tree.evict_all() == Ids({ids[2]}));
  tree.drop_pin(ids[1]);
  CHECK(tree.evict_all().empty());
  tree.drop_pin(ids[1]);
  CHECK(tree.evict_all() == Ids({ids[1], ids[0]}));
}

TEST(chunk_tree, what_is_written_to_stays) {
  Tree tree;
  const Id id = tree.put(kNone);
  Transfer transfer;
  tree.fill_with(id, {1}, {transfer.ticket()});
  CHECK_EQ(tree.evict(), kNone);
  transfer.end(true);
  CHECK_EQ(tree.evict(), kNone);  // settle() has not seen it
  tree.settle();
  CHECK_EQ(tree.evict(), id);
  CHECK_EQ(tree.used(), 0);
}

// --- removing ------------------------------------------------------------------------------------

TEST(chunk_tree, a_removed_chunk_keeps_its_number_while_others_hang_on_it) {
  Tree tree;
  const Ids ids = tree.chain(2);
  tree.remove(ids[0]);
  CHECK(tree.take_changes().empty());
  CHECK(!tree.present(ids[0]));
  CHECK_EQ(tree.used(), 1);
  tree.remove(ids[1]);
  CHECK(tree.take_changes() == Changes({{ids[0], kNone}, {ids[1], kNone}}));
  CHECK_THROWS(std::out_of_range, "there is no chunk", tree.present(ids[0]));
}

TEST(chunk_tree, a_removed_chunk_is_read_as_long_as_it_is_held) {
  Tree tree;
  const Ids ids = tree.chain(3);
  const Slots before = slots_of(tree, ids[1], 0);
  tree.pin(ids[1]);
  tree.pin(ids[1]);
  tree.remove(ids[1]);
  CHECK_EQ(tree.size(), 2);
  CHECK(slots_of(tree, ids[1], 0) == before);
  // Its key has another number, on which ids[2] hangs.
  const Changes changes = tree.take_changes();
  REQUIRE(changes.size() == 1);
  CHECK_EQ(changes[0].first, ids[1]);
  const Id key = changes[0].second;
  CHECK(!tree.present(key));
  CHECK_EQ(tree.put(ids[0], {0}, key), key);
  CHECK_EQ(tree.used(), 4);
  tree.drop_pin(ids[1]);
  CHECK_EQ(tree.used(), 4);
  tree.pin(ids[1]);  // held still
  tree.drop_pin(ids[1]);
  tree.drop_pin(ids[1]);
  CHECK_EQ(tree.used(), 3);
  CHECK(tree.evict_all() == Ids({ids[2], key, ids[0]}));
}

TEST(chunk_tree, a_removed_chunk_keeps_its_slots_while_they_are_written_to) {
  Tree tree;
  const Id id = tree.put(kNone);
  Transfer transfer;
  tree.fill_with(id, {1}, {transfer.ticket()});
  tree.remove(id);
  CHECK(tree.take_changes() == Changes({{id, kNone}}));
  tree.settle();
  CHECK_EQ(tree.used(), 2);
  transfer.end(true);
  tree.settle();
  CHECK_EQ(tree.used(), 0);
}

TEST(chunk_tree, nothing_is_left_of_all_chunks_but_what_is_held) {
  Tree tree;
  const Ids ids = tree.chain(4);
  Transfer transfer;
  tree.pin(ids[1]);
  tree.fill_with(ids[2], {1}, {transfer.ticket()});
  tree.remove_all();
  CHECK_EQ(tree.size(), 0);
  CHECK_EQ(tree.used(), 3);
  CHECK_EQ(tree.evict(), kNone);
  std::vector<Id> keys = ids;
  for (const auto& [from, to] : tree.take_changes()) std::ranges::replace(keys, from, to);
  CHECK(keys == Ids(4, kNone));
  tree.drop_pin(ids[1]);
  CHECK_EQ(tree.used(), 2);
  transfer.end(false);
  tree.settle();
  CHECK_EQ(tree.used(), 0);
}

TEST(chunk_tree, a_key_that_comes_and_goes_takes_no_new_numbers) {
  Tree tree;
  const Ids ids = tree.chain(4);
  Id highest = 0;
  Id key = ids[1];
  for (int round = 0; round < 1'000; ++round) {
    tree.pin(key);
    tree.remove(key);
    const Changes changes = tree.take_changes();
    REQUIRE(changes.size() == 1);
    tree.drop_pin(key);
    key = tree.put(ids[0], {0}, changes[0].second);
    highest = std::max(highest, key);
  }
  CHECK(highest < 6);
  CHECK_EQ(tree.used(), 4);
}

// --- layers and transfers ------------------------------------------------------------------------

TEST(chunk_tree, only_whole_layers_are_held_and_end_a_prefix) {
  Tree tree;
  const Ids ids = tree.chain(2);
  Transfer transfer;
  tree.fill_with(ids[0], {7}, {transfer.ticket()});
  CHECK(tree.missing(ids[0], Layers{0, 7, 8}) == Layers{8});
  CHECK(tree.missing(kNone, Layers{0, 7}) == Layers({0, 7}));
  CHECK(!tree.holds(ids[0], 7));
  CHECK_EQ(tree.pinned(ids, {0, 7}), 0U);
  transfer.end(true);
  CHECK(!tree.holds(ids[0], 7));
  tree.settle();
  CHECK(tree.holds(ids[0], 7));
  CHECK_EQ(tree.pinned(ids, {0, 7}), 1U);
  CHECK_EQ(tree.pinned({ids[0], kNone, ids[1]}, {0}), 1U);
  CHECK_EQ(tree.pinned(ids, {0}), 2U);
  tree.unpin(Ids{ids[0], ids[1], ids[0], ids[0]});
  CHECK_EQ(tree.evict_all().size(), 2U);
}

TEST(chunk_tree, a_layer_is_whole_when_all_its_transfers_are_done) {
  Tree tree;
  const Id id = tree.add(kNone, kNone);
  Transfer first, second;
  tree.fill_with(id, {0}, {first.ticket(), second.ticket(), first.ticket()});
  second.end(true);
  tree.settle();
  CHECK(!tree.holds(id, 0));
  first.end(true);
  tree.settle();
  CHECK(tree.holds(id, 0));
}

TEST(chunk_tree, the_transfers_of_a_layer_are_those_that_bring_it) {
  Tree tree;
  const Id id = tree.put(kNone), other = tree.put(kNone);
  Transfer first, second, third;
  tree.fill_with(id, {1}, {first.ticket(), second.ticket()});
  tree.fill_with(id, {2}, {third.ticket()});
  tree.fill_with(other, {1, 2}, {second.ticket()});
  using Tickets = ChunkTree::Tickets;
  CHECK(tree.tickets_of({id, other}, {0}).empty());
  CHECK(tree.tickets_of({id}, {0, 2}) == Tickets{third.ticket()});
  CHECK(tree.tickets_of({id, other}, {1}) == Tickets({first.ticket(), second.ticket()}));
  for (Transfer* transfer : {&first, &second, &third}) transfer->end(true);
  tree.settle();
  CHECK(tree.tickets_of({id, other}, {0, 1, 2}).empty());
}

TEST(chunk_tree, a_chunk_of_which_a_transfer_failed_goes_with_all_its_layers) {
  Tree tree;
  const Ids ids = tree.chain(2);
  Transfer good, bad;
  tree.fill_with(ids[0], {1}, {good.ticket(), bad.ticket()});
  bad.end(false);
  tree.settle();
  CHECK(tree.present(ids[0]));  // good writes to it still
  good.end(true);
  tree.settle();
  CHECK(!tree.present(ids[0]));
  CHECK_EQ(tree.used(), 1);
}

TEST(chunk_tree, who_holds_a_chunk_learns_which_transfer_failed) {
  Tree tree;
  const Id id = tree.put(kNone);
  Transfer bad, slow;
  tree.fill_with(id, {1}, {bad.ticket()});
  tree.fill_with(id, {2}, {slow.ticket()});
  tree.pin(id);
  bad.end(false);
  tree.settle();
  CHECK(tree.take_changes() == Changes({{id, kNone}}));
  tree.settle();
  CHECK(tree.tickets_of({id}, {1}) == ChunkTree::Tickets{bad.ticket()});
  CHECK(tree.tickets_of({id}, {2}) == ChunkTree::Tickets{slow.ticket()});
  CHECK(tree.tickets_of({id}, {0}).empty());
  CHECK_THROWS(std::invalid_argument, "is not there", tree.fill_with(id, {3}, {}));
  tree.slots->free({3});
  tree.drop_pin(id);
  CHECK_EQ(tree.used(), 3);
  slow.end(true);
  tree.settle();
  CHECK_EQ(tree.used(), 0);
  // Its number tells nothing of the next one's transfers.
  CHECK_EQ(tree.put(kNone, {1}), id);
  CHECK(tree.tickets_of({id}, {1}).empty());
}

TEST(chunk_tree, slots_come_in_runs_of_one_format) {
  Tree tree;
  const int wide = tree.add_format(tree.slots);
  const Ids ids = {tree.put(kNone), tree.put(kNone), tree.add(kNone, kNone)};
  const Slots slots = tree.allocate(wide, 1).value();
  tree.fill(ids[2], wide, std::vector<ChunkTree::LayerSlot>{{0, slots[0]}}, {});
  const auto runs = tree.runs(Ids{ids[1], ids[0], ids[2], ids[2]}, 0);
  REQUIRE(runs.size() == 2);
  CHECK_EQ(runs[0].format, 0);
  CHECK(runs[0].slots == Slots({1, 0}));
  CHECK_EQ(runs[1].format, wide);
  CHECK(runs[1].slots == Slots({slots[0], slots[0]}));
  CHECK_THROWS(std::out_of_range, "chunk 0 has no layer 5", tree.runs(Ids{ids[0]}, 5));
}

// --- slots ---------------------------------------------------------------------------------------

TEST(chunk_tree, room_is_made_by_as_many_chunks_as_that_takes) {
  Tree tree(4);
  const Ids ids = tree.chain(4);
  CHECK(tree.allocate(0, 2).has_value());
  CHECK_EQ(tree.size(), 2);
  CHECK_EQ(tree.num_evicted(), 2);
  tree.pin(ids[1]);
  CHECK(!tree.allocate(0, 1).has_value());
  CHECK_EQ(tree.used(), 4);
  CHECK(tree.allocate(0, 0) == Slots{});
}

TEST(chunk_tree, slots_are_neighbours_where_there_are_some) {
  Tree tree(8);
  CHECK(tree.allocate(0, 8).has_value());
  tree.slots->free({0, 2, 4, 5, 6});
  CHECK(tree.allocate(0, 3) == Slots({4, 5, 6}));
  CHECK(tree.allocate(0, 2) == Slots({0, 2}));
}

TEST(chunk_tree, retired_slots_are_free_once_nothing_writes_to_them) {
  Tree tree;
  const Slots slots = tree.allocate(0, 3).value();
  Transfer first, second;
  tree.retire(0, {slots[0]}, {first.ticket(), second.ticket()});
  tree.retire(0, {slots[1]}, {});
  CHECK_EQ(tree.used(), 2);
  first.end(true);
  tree.settle();
  CHECK_EQ(tree.used(), 2);
  second.end(false);
  tree.retire(0, {slots[2]}, {});
  CHECK_EQ(tree.used(), 0);
}

// --- what is refused changes nothing -------------------------------------------------------------

TEST(chunk_tree, numbers_of_no_chunk_are_refused) {
  Tree tree;
  const Id id = tree.put(kNone);
  for (const Id odd : {kNone, id + 1, std::numeric_limits<Id>::max(), Id{-7}}) {
    if (odd != kNone) {
      CHECK_THROWS(std::out_of_range, "there is no chunk", tree.present(odd));
      CHECK_THROWS(std::out_of_range, "there is no chunk", tree.add(odd, kNone));
      CHECK_THROWS(std::out_of_range, "there is no chunk", tree.add(kNone, odd));
      CHECK_THROWS(std::out_of_range, "there is no chunk", tree.remove(odd));
      CHECK_THROWS(std::out_of_range, "there is no chunk", tree.fill(odd, 0, {}, {}));
      CHECK_THROWS(std::out_of_range, "there is no chunk", tree.missing(odd, Layers{0}));
    }
    CHECK_THROWS(std::out_of_range, "there is no chunk", tree.pin(odd));
    CHECK_THROWS(std::out_of_range, "there is no chunk", tree.unpin(Ids{odd}));
    CHECK_THROWS(std::out_of_range, "there is no chunk", tree.runs(Ids{odd}, 0));
    CHECK_THROWS(std::out_of_range, "there is no chunk", tree.tickets_of({odd}, {0}));
  }
  CHECK_THROWS(std::invalid_argument, "chunk -1 is not there", tree.remove(kNone));
  CHECK_EQ(tree.size(), 1);
  CHECK(tree.evict_all() == Ids{id});
}

TEST(chunk_tree, formats_that_there_are_not_are_refused) {
  Tree tree;
  const Id id = tree.put(kNone);
  for (const int odd : {-1, 1}) {
    CHECK_THROWS(std::out_of_range, "there is no format", tree.allocate(odd, 1));
    CHECK_THROWS(std::out_of_range, "there is no format", tree.retire(odd, {}, {}));
    CHECK_THROWS(std::out_of_range, "there is no format",
                 tree.fill(id, odd, std::vector<ChunkTree::LayerSlot>{{1, 1}}, {}));
  }
  CHECK_THROWS(std::invalid_argument, "cannot allocate -1 slots", tree.allocate(0, -1));
  CHECK(tree.missing(id, Layers{1}) == Layers{1});
  CHECK(tree.evict_all() == Ids{id});
}

TEST(chunk_tree, a_chunk_that_is_there_is_not_added_again) {
  Tree tree;
  const Id id = tree.put(kNone);
  CHECK_THROWS(std::invalid_argument, "is there already", tree.add(id, kNone));
  tree.pin(id);
  tree.remove(id);
  CHECK_THROWS(std::invalid_argument, "is there already", tree.add(id, kNone));
  CHECK_EQ(tree.size(), 0);
}

TEST(chunk_tree, nothing_hangs_on_a_removed_chunk) {
  Tree tree;
  const Id id = tree.put(kNone);
  tree.pin(id);
  tree.remove(id);
  CHECK_THROWS(std::invalid_argument, "nothing can hang on it", tree.add(kNone, id));
  CHECK_EQ(tree.size(), 0);
  tree.drop_pin(id);
  CHECK_EQ(tree.used(), 0);
}

TEST(chunk_tree, a_chunk_does_not_hang_on_what_hangs_on_it) {
  Tree tree;
  const Ids ids = tree.chain(3);
  tree.remove(ids[0]);
  for (const Id id : ids) {
    CHECK_THROWS(std::invalid_argument, "cannot hang on chunk", tree.add(ids[0], id));
  }
  CHECK_EQ(tree.size(), 2);
  CHECK(tree.evict_all() == Ids({ids[2], ids[1]}));
}

TEST(chunk_tree, a_pin_needs_a_chunk) {
  Tree tree;
  const Id absent = tree.add_absent();
  const Id child = tree.put(absent);
  CHECK_THROWS(std::invalid_argument, "is not there", tree.pin(absent));
  Transfer transfer;
  tree.fill_with(child, {1}, {transfer.ticket()});
  tree.remove(child);
  CHECK_THROWS(std::invalid_argument, "is not there", tree.pin(child));
  transfer.end(true);
  tree.settle();
  CHECK_EQ(tree.used(), 0);
}

TEST(chunk_tree, pins_are_taken_back_all_or_none) {
  Tree tree;
  const Ids ids = tree.chain(3);
  tree.pin(ids[0]);
  tree.pin(ids[1]);
  tree.pin(ids[1]);
  tree.remove(ids[1]);
  for (const Ids& odd :
       {Ids{ids[1], ids[0], ids[2]}, Ids{ids[1], ids[0], ids[0]}, Ids{ids[1], ids[1], ids[1]}}) {
    CHECK_THROWS(std::invalid_argument, "has no pin", tree.unpin(odd));
  }
  CHECK_THROWS(std::out_of_range, "there is no chunk", tree.unpin(Ids{ids[1], ids[0], 99}));
  CHECK_EQ(tree.used(), 3);
  // What is there twice is held twice.
  tree.unpin(Ids{ids[1], ids[0], ids[1]});
  CHECK_EQ(tree.used(), 2);
  CHECK(tree.evict_all() == Ids({ids[2], ids[0]}));
}

TEST(chunk_tree, a_layer_that_is_there_is_not_filled_again) {
  Tree tree;
  const Id id = tree.put(kNone);
  using Added = std::vector<ChunkTree::LayerSlot>;
  CHECK_THROWS(std::invalid_argument, "chunk 0 has layer 0 already",
               tree.fill(id, 0, Added{{1, 1}, {0, 2}}, {}));
  CHECK_THROWS(std::invalid_argument, "chunk 0 has layer 1 already",
               tree.fill(id, 0, Added{{1, 1}, {1, 2}}, {}));
  CHECK(tree.missing(id, Layers{0, 1}) == Layers{1});
  CHECK(tree.evict_all() == Ids{id});
}

TEST(chunk_tree, a_ticket_that_is_none_is_refused) {
  Tree tree;
  const Id id = tree.put(kNone);
  CHECK_THROWS(std::invalid_argument, "one of 1 tickets is none",
               tree.fill(id, 0, std::vector<ChunkTree::LayerSlot>{{1, 1}}, {nullptr}));
  CHECK_THROWS(std::invalid_argument, "one of 1 tickets is none", tree.retire(0, {}, {nullptr}));
  tree.settle();
  CHECK(tree.missing(id, Layers{1}) == Layers{1});
  CHECK(tree.evict_all() == Ids{id});
}

TEST(chunk_tree, an_absent_chunk_is_not_removed_or_filled) {
  Tree tree;
  const Id absent = tree.add_absent();
  tree.put(absent);
  CHECK_THROWS(std::invalid_argument, "is not there", tree.remove(absent));
  CHECK_THROWS(std::invalid_argument, "is not there", tree.fill(absent, 0, {}, {}));
  CHECK(!tree.holds(absent, 0));
  CHECK(tree.missing(absent, Layers{0}) == Layers{0});
}

// --- against a model -----------------------------------------------------------------------------

namespace {

// Two formats share a pool, a third has its own.
constexpr int kFormats = 3;
constexpr int pool_of(int format) { return format == 2; }
constexpr std::int64_t kSlots[] = {20, 6};
constexpr int kKeys = 14;
constexpr std::int64_t kAllLayers = 3;

// A tree beside a model so simple that it looks at everything each time.
class Play {
 public:
  explicit Play(std::uint64_t seed) : random_(seed) {
    for (const std::int64_t slots : kSlots) pools_.push_back(make_pool(slots));
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
    std::vector<std::shared_ptr<Transfer>> transfers;
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
    std::vector<std::shared_ptr<Transfer>> transfers;
  };

  static bool pending(const std::vector<std::shared_ptr<Transfer>>& transfers) {
    return std::ranges::any_of(transfers, [](const auto& t) { return t->pending(); });
  }
  static ChunkTree::Tickets tickets_of(const std::vector<std::shared_ptr<Transfer>>& transfers) {
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
  std::vector<std::shared_ptr<Transfer>> any_transfers() {
    std::vector<std::shared_ptr<Transfer>> chosen;
    for (std::int64_t i = random_.in(0, 3); i > 0; --i) {
      if (transfers_.empty() || random_.chance(40)) {
        transfers_.push_back(std::make_shared<Transfer>());
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
    bool expected = true;
    while (kSlots[pool] - std::ssize(used(pool)) < count) {
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
  std::vector<std::shared_ptr<Transfer>> transfers_;
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
