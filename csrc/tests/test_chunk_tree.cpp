#include "core/chunk_tree.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "tests/harness.h"
#include "tests/held_transfer.h"

namespace hscache::test {
namespace {

using Id = ChunkTree::Id;
using Ids = std::vector<Id>;
using Slots = std::vector<std::int64_t>;
using Layers = std::vector<std::int64_t>;
using Changes = std::vector<std::pair<Id, Id>>;

constexpr Id kNone = ChunkTree::kNone;

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

TEST(chunk_tree, what_comes_back_without_its_predecessor_goes_before_all_others) {
  Tree tree;
  const Id other = tree.put(kNone);
  const Ids ids = tree.chain(2);
  const Id child = tree.put(ids[1]);
  tree.remove(ids[1]);
  tree.remove(ids[0]);
  tree.put(tree.add_absent(), {0}, ids[1]);
  CHECK(tree.evict_all() == Ids({child, ids[1], other}));
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
  HeldTransfer transfer;
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
  HeldTransfer transfer;
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
  HeldTransfer transfer;
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
  HeldTransfer transfer;
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
  HeldTransfer first, second;
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
  HeldTransfer first, second, third;
  tree.fill_with(id, {1}, {first.ticket(), second.ticket()});
  tree.fill_with(id, {2}, {third.ticket()});
  tree.fill_with(other, {1, 2}, {second.ticket()});
  using Tickets = ChunkTree::Tickets;
  CHECK(tree.tickets_of({id, other}, {0}).empty());
  CHECK(tree.tickets_of({id}, {0, 2}) == Tickets{third.ticket()});
  CHECK(tree.tickets_of({id, other}, {1}) == Tickets({first.ticket(), second.ticket()}));
  for (HeldTransfer* transfer : {&first, &second, &third}) transfer->end(true);
  tree.settle();
  CHECK(tree.tickets_of({id, other}, {0, 1, 2}).empty());
}

TEST(chunk_tree, a_chunk_of_which_a_transfer_failed_goes_with_all_its_layers) {
  Tree tree;
  const Ids ids = tree.chain(2);
  HeldTransfer good, bad;
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
  HeldTransfer bad, slow;
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
  CHECK_EQ(tree.add(kNone, kNone), id);
  HeldTransfer next;
  tree.fill_with(id, {0, 1}, {next.ticket()});
  CHECK(tree.tickets_of({id}, {1}) == ChunkTree::Tickets{next.ticket()});
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
  HeldTransfer first, second;
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
  HeldTransfer transfer;
  tree.fill_with(child, {1}, {transfer.ticket()});
  tree.remove(child);
  CHECK_THROWS(std::invalid_argument, "is not there", tree.pin(child));
  transfer.end(true);
  tree.settle();
  CHECK_EQ(tree.used(), 0);
}

TEST(chunk_tree, a_prefix_with_an_odd_number_is_pinned_nowhere) {
  Tree tree;
  const Ids ids = tree.chain(2);
  CHECK_THROWS(std::out_of_range, "there is no chunk 99", tree.pinned({ids[0], ids[1], 99}, {0}));
  CHECK(tree.evict_all() == Ids({ids[1], ids[0]}));
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

}  // namespace hscache::test
