// Which chunks the pool holds, how they hang together, and which of them goes next.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/slot_pool.h"
#include "core/ticket.h"

namespace hscache {

// Chunks by number, as a forest of prefixes. A chunk's layers are one family: each has a slot of
// its own, and all go together.
//
// Eviction takes leaves first, for a chunk without its predecessors is of no use to anybody; a
// chunk whose predecessor is gone goes before all others; among equals the least recently used one
// goes. Busy chunks stay: those that are pinned, and those that a transfer still writes to.
//
// The caller keeps keys: a dictionary from key to number. A number may stand for a key whose chunk
// is *absent* while others hang on it, so that they find it when it comes again; changes() tells
// when a key's number is another one, or none. Memory: about 130 bytes a chunk of one layer, 40
// more for each further layer.
//
// What is refused throws std::out_of_range (a number or format that there is not) or
// std::invalid_argument, and changes nothing.
//
// Not thread-safe.
class ChunkTree {
 public:
  using Id = std::int32_t;
  static constexpr Id kNone = -1;
  using Tickets = std::vector<std::shared_ptr<Ticket>>;

  struct LayerSlot {
    std::int64_t layer = 0;
    std::int64_t slot = 0;
  };
  // Slots of one format in a row of chunks.
  struct Run {
    int format = 0;
    std::vector<std::int64_t> slots;
  };

  // Rows of a new format, kept in slots of `pool`: returns the format's number. Formats may share a
  // pool.
  int add_format(std::shared_ptr<SlotPool> pool);

  // A number for a key whose chunk is absent.
  Id add_absent();
  // Makes an absent chunk present, or a new one where `id` is kNone; it has no layers yet. `parent`
  // may be absent; kNone is for the first of a prefix. A chunk cannot hang on what hangs on it.
  Id add(Id id, Id parent);
  bool present(Id id) const;
  std::int64_t size() const { return num_present_; }

  // Drops a chunk with all its layers. Where it is busy its slots go when it is not any more.
  void remove(Id id);
  void remove_all();

  // Since the last call: keys that were `first`'s are now `second`'s, kNone: nobody's. The numbers
  // that keys lost are used again.
  std::vector<std::pair<Id, Id>> take_changes();

  // Gives a present chunk layers that it lacks, which are there once all of `tickets` are done.
  // Where one of them fails the chunk is dropped. The slots are the chunk's from now on.
  void fill(Id id, int format, std::span<const LayerSlot> layers, const Tickets& tickets);
  // Of `layers` those that a chunk lacks, wherever they are on their way; of an absent one all.
  std::vector<std::int64_t> missing(Id id, std::span<const std::int64_t> layers) const;
  // Whether a layer is there, whole.
  bool holds(Id id, std::int64_t layer) const;

  // The chunks from the front that have all of `layers`, whole: how many. Marks them as just used
  // and pins each. Numbers may be kNone.
  std::size_t pin_prefix(std::span<const Id> ids, std::span<const std::int64_t> layers);
  // Marks a chunk as just used and holds it, also after remove(); each pin is taken back once. One
  // that was removed may be pinned as long as it is held.
  void pin(Id id);
  void unpin(std::span<const Id> ids);

  // The slots of one layer of chunks that have it, in order: a run for each change of format.
  std::vector<Run> runs(std::span<const Id> ids, std::int64_t layer) const;
  // The transfers that still bring some of `layers`, or failed to and somebody held the chunk then;
  // each once.
  Tickets tickets(std::span<const Id> ids, std::span<const std::int64_t> layers) const;

  // Takes note of transfers that have ended since. Everything else sees what was true at the last
  // call. Takes time for each transfer that is pending, not for each chunk.
  void settle();

  // Drops the chunk that goes next: returns its number, or kNone where all are busy.
  Id evict();
  // Slots for rows of a format, all or none, evicting as many chunks as that takes. Neighbours
  // where there are some.
  std::optional<std::vector<std::int64_t>> allocate(int format, std::int64_t count);
  // Gives back slots that are no chunk's, once none of `tickets` writes to them any more.
  void retire(int format, std::vector<std::int64_t> slots, const Tickets& tickets);

  std::int64_t num_evicted() const { return num_evicted_; }

 private:
  struct LayerRows {
    std::int64_t layer = 0;
    std::int64_t slot = 0;
    int format = 0;
    bool whole = false;
  };
  struct Node {
    Id parent = kNone;
    Id first_child = kNone;
    Id next_sibling = kNone;
    Id previous_sibling = kNone;
    std::uint64_t last_used = 0;
    std::uint32_t record = 0;  // number of its record among the candidates; 0 without one
    std::int32_t pins = 0;
    std::int32_t filling = kNone;  // the first of fillings_ that are its own
    enum class State : std::uint8_t { kFree, kAbsent, kPresent, kDoomed } state = State::kFree;
    bool reachable = false;  // present, as all its predecessors are
    std::vector<LayerRows> layers;

    bool busy() const { return pins > 0 || filling != kNone; }
  };
  // May lag behind what was used since, and is put right when it comes up, so that marking a chunk
  // as used costs nothing here. Void when its node's record is another one.
  struct Candidate {
    std::uint64_t order = 0;  // when it was last used, behind whether it can be reached
    std::uint32_t record = 0;
    Id id = kNone;
    bool operator>(const Candidate& other) const { return order > other.order; }
  };
  // Slots that transfers write to.
  struct Filling {
    Id id = kNone;  // kNone: no chunk's
    int format = 0;
    std::vector<std::int64_t> slots;
    Tickets tickets;
    std::int64_t pending = 0;   // of the tickets
    std::int32_t next = kNone;  // of the same chunk
  };
  // So that a transfer for a thousand chunks is asked once whether it has ended.
  struct Transfer {
    std::shared_ptr<Ticket> ticket;
    std::vector<std::int32_t> fillings;  // once for each time that it is among their tickets
  };

  Node& node(Id id);
  const Node& node(Id id) const;
  Id new_node();
  void free_node(Id id);
  void link(Id id, Id parent);
  void unlink(Id id);
  void drop_absent(Id id);
  void mark_reachable(Id id, bool reachable);
  bool hangs_on(Id id, Id above) const;  // `above` is absent
  void touch(Node& found) { found.last_used = ++clock_; }
  void file(Id id);
  void free_layers(Node& found);
  SlotPool& pool(int format) const;
  void start_filling(Filling filling);
  void end_filling(Filling filling);
  void end_doomed(Id id);
  static std::uint64_t order_of(const Node& found);

  std::vector<std::shared_ptr<SlotPool>> pools_;  // by format
  std::deque<Node> nodes_;
  std::vector<Id> free_ids_;
  std::vector<Candidate> candidates_;  // a heap
  std::vector<Filling> fillings_;
  std::vector<std::int32_t> free_fillings_;
  std::vector<std::int32_t> ended_;  // of fillings_: nothing writes to them any more
  std::vector<Transfer> transfers_;  // pending at the last look
  std::unordered_map<Id, std::vector<Filling>> failed_;  // for who holds a chunk to see why
  std::vector<std::pair<Id, Id>> changes_;
  std::uint64_t clock_ = 0;
  std::uint32_t records_ = 0;
  std::int64_t num_present_ = 0;
  std::int64_t num_evicted_ = 0;
};

}  // namespace hscache
