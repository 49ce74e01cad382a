#include "core/chunk_tree.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>

namespace hscache {
namespace {

constexpr std::uint64_t kReachable = std::uint64_t{1} << 63;
// Fewer void candidates are not worth a clean-up.
constexpr std::size_t kFewCandidates = 64;

void check_tickets(const ChunkTree::Tickets& tickets) {
  if (std::ranges::find(tickets, nullptr) != tickets.end()) {
    throw std::invalid_argument("one of " + std::to_string(tickets.size()) + " tickets is none");
  }
}

}  // namespace

ChunkTree::Node& ChunkTree::node(Id id) {
  return const_cast<Node&>(static_cast<const ChunkTree&>(*this).node(id));
}

const ChunkTree::Node& ChunkTree::node(Id id) const {
  if (id < 0 || static_cast<std::size_t>(id) >= nodes_.size() ||
      nodes_[static_cast<std::size_t>(id)].state == Node::State::kFree) {
    throw std::out_of_range("there is no chunk " + std::to_string(id) + " among the " +
                            std::to_string(nodes_.size()));
  }
  return nodes_[static_cast<std::size_t>(id)];
}

int ChunkTree::add_format(std::shared_ptr<SlotPool> pool) {
  pools_.push_back(std::move(pool));
  return static_cast<int>(pools_.size()) - 1;
}

// --- nodes ---------------------------------------------------------------------------------------

ChunkTree::Id ChunkTree::new_node() {
  if (free_ids_.empty()) {
    if (nodes_.size() >= static_cast<std::size_t>(std::numeric_limits<Id>::max())) {
      throw std::length_error("the index has " + std::to_string(nodes_.size()) +
                              " chunks, the most that it can number: make chunks larger");
    }
    // So that giving a number back never needs memory.
    if (free_ids_.capacity() == nodes_.size()) free_ids_.reserve(2 * nodes_.size() + 1);
    nodes_.emplace_back();
    return static_cast<Id>(nodes_.size()) - 1;
  }
  const Id id = free_ids_.back();
  free_ids_.pop_back();
  return id;
}

void ChunkTree::free_node(Id id) {
  nodes_[static_cast<std::size_t>(id)] = {};
  free_ids_.push_back(id);
}

void ChunkTree::link(Id id, Id parent) {
  Node& child = node(id);
  child.parent = parent;
  if (parent == kNone) return;
  Node& above = node(parent);
  child.next_sibling = above.first_child;
  if (above.first_child != kNone) node(above.first_child).previous_sibling = id;
  above.first_child = id;
}

void ChunkTree::unlink(Id id) {
  Node& child = node(id);
  const Id parent = child.parent;
  if (parent == kNone) return;
  if (child.next_sibling != kNone) {
    node(child.next_sibling).previous_sibling = child.previous_sibling;
  }
  if (child.previous_sibling != kNone) {
    node(child.previous_sibling).next_sibling = child.next_sibling;
  } else {
    node(parent).first_child = child.next_sibling;
  }
  child.parent = child.next_sibling = child.previous_sibling = kNone;
  if (node(parent).first_child != kNone) return;
  if (node(parent).state == Node::State::kAbsent) {
    drop_absent(parent);
  } else {
    file(parent);
  }
}

// A number that stood for its key only so that others could hang on it.
void ChunkTree::drop_absent(Id id) {
  changes_.emplace_back(id, kNone);
  free_node(id);
}

void ChunkTree::mark_reachable(Id id, bool reachable) {
  std::vector<Id> pending{id};
  while (!pending.empty()) {
    const Id next = pending.back();
    pending.pop_back();
    Node& found = node(next);
    found.reachable = reachable;
    if (!reachable) {
      found.record = 0;  // filed too late now
      file(next);
    }
    for (Id child = found.first_child; child != kNone; child = node(child).next_sibling) {
      pending.push_back(child);
    }
  }
}

bool ChunkTree::hangs_on(Id id, Id above) const {
  // What can be reached hangs on nothing absent. An absent one hangs on nothing, so that this ends.
  while (id != kNone && id != above && !node(id).reachable) id = node(id).parent;
  return id == above;
}

ChunkTree::Id ChunkTree::add_absent() {
  const Id id = new_node();
  nodes_[static_cast<std::size_t>(id)].state = Node::State::kAbsent;
  return id;
}

ChunkTree::Id ChunkTree::add(Id id, Id parent) {
  if (parent != kNone && node(parent).state == Node::State::kDoomed) {
    throw std::invalid_argument("chunk " + std::to_string(parent) +
                                " was removed: nothing can hang on it");
  }
  if (id == kNone) {
    id = add_absent();
  } else if (node(id).state != Node::State::kAbsent) {
    throw std::invalid_argument("chunk " + std::to_string(id) + " is there already");
  } else if (hangs_on(parent, id)) {
    throw std::invalid_argument("chunk " + std::to_string(id) + " cannot hang on chunk " +
                                std::to_string(parent) + ", which hangs on it");
  }
  Node& added = node(id);
  added.state = Node::State::kPresent;
  ++num_present_;
  link(id, parent);
  touch(added);
  const bool reachable = parent == kNone || node(parent).reachable;
  if (reachable) mark_reachable(id, true);
  file(id);
  return id;
}

bool ChunkTree::present(Id id) const {
  return id != kNone && node(id).state == Node::State::kPresent;
}

void ChunkTree::remove(Id id) {
  if (!present(id)) throw std::invalid_argument("chunk " + std::to_string(id) + " is not there");
  Node& gone = node(id);
  --num_present_;
  unlink(id);
  gone.record = 0;
  gone.reachable = false;
  for (Id child = gone.first_child; child != kNone; child = node(child).next_sibling) {
    if (node(child).reachable) mark_reachable(child, false);
  }
  if (!gone.busy()) {
    free_layers(gone);
    if (gone.first_child == kNone) {
      drop_absent(id);
    } else {
      gone.state = Node::State::kAbsent;
    }
    return;
  }
  gone.state = Node::State::kDoomed;
  if (gone.first_child == kNone) {
    changes_.emplace_back(id, kNone);
    return;
  }
  // What hangs on it hangs on its key, which needs another number now.
  const Id stand_in = add_absent();
  node(stand_in).first_child = gone.first_child;
  for (Id child = gone.first_child; child != kNone; child = node(child).next_sibling) {
    node(child).parent = stand_in;
  }
  gone.first_child = kNone;
  changes_.emplace_back(id, stand_in);
}

void ChunkTree::remove_all() {
  for (std::size_t i = 0; i < nodes_.size(); ++i) {
    if (nodes_[i].state == Node::State::kPresent) remove(static_cast<Id>(i));
  }
  candidates_.clear();  // void, all of them
}

std::vector<std::pair<ChunkTree::Id, ChunkTree::Id>> ChunkTree::take_changes() {
  return std::exchange(changes_, {});
}

void ChunkTree::free_layers(Node& found) {
  std::vector<std::int64_t> slots;
  for (std::size_t i = 0; i < found.layers.size(); ++i) {
    const LayerRows& rows = found.layers[i];
    slots.push_back(rows.slot);
    if (i + 1 == found.layers.size() || found.layers[i + 1].format != rows.format) {
      pool(rows.format).free(slots);
      slots.clear();
    }
  }
  found.layers = {};
}

// Of a chunk without a key: when nobody needs it any more its slots and its number are free.
void ChunkTree::end_doomed(Id id) {
  Node& found = node(id);
  if (found.state != Node::State::kDoomed || found.busy()) return;
  free_layers(found);
  failed_.erase(id);
  free_node(id);
}

SlotPool& ChunkTree::pool(int format) const {
  if (format < 0 || static_cast<std::size_t>(format) >= pools_.size()) {
    throw std::out_of_range("there is no format " + std::to_string(format) + " among the " +
                            std::to_string(pools_.size()));
  }
  return *pools_[static_cast<std::size_t>(format)];
}

// --- layers --------------------------------------------------------------------------------------

void ChunkTree::fill(Id id, int format, std::span<const LayerSlot> layers, const Tickets& tickets) {
  if (!present(id)) throw std::invalid_argument("chunk " + std::to_string(id) + " is not there");
  pool(format);
  check_tickets(tickets);
  Node& found = node(id);
  const std::size_t before = found.layers.size();
  Filling filling{.id = id, .format = format, .slots = {}, .tickets = tickets};
  for (const LayerSlot& added : layers) {
    if (std::ranges::find(found.layers, added.layer, &LayerRows::layer) != found.layers.end()) {
      found.layers.resize(before);
      throw std::invalid_argument("chunk " + std::to_string(id) + " has layer " +
                                  std::to_string(added.layer) + " already");
    }
    found.layers.push_back({.layer = added.layer, .slot = added.slot, .format = format});
    filling.slots.push_back(added.slot);
  }
  start_filling(std::move(filling));
}

// Files slots under the transfers that write to them.
void ChunkTree::start_filling(Filling filling) {
  if (free_fillings_.empty()) {
    free_fillings_.push_back(static_cast<std::int32_t>(fillings_.size()));
    fillings_.emplace_back();
  }
  const std::int32_t number = free_fillings_.back();
  free_fillings_.pop_back();
  filling.pending = std::ssize(filling.tickets);
  if (filling.pending == 0) ended_.push_back(number);
  for (const auto& ticket : filling.tickets) {
    // Mostly the latest one.
    auto transfer = std::find_if(transfers_.rbegin(), transfers_.rend(),
                                 [&](const Transfer& other) { return other.ticket == ticket; });
    if (transfer == transfers_.rend()) {
      transfers_.push_back({ticket, {}});
      transfer = transfers_.rbegin();
    }
    transfer->fillings.push_back(number);
  }
  if (filling.id != kNone) filling.next = std::exchange(node(filling.id).filling, number);
  fillings_[static_cast<std::size_t>(number)] = std::move(filling);
}

std::vector<std::int64_t> ChunkTree::missing(Id id, std::span<const std::int64_t> layers) const {
  std::vector<std::int64_t> lacking;
  for (const std::int64_t layer : layers) {
    const bool there =
        present(id) && std::ranges::any_of(node(id).layers, [layer](const auto& rows) {
          return rows.layer == layer;
        });
    if (!there) lacking.push_back(layer);
  }
  return lacking;
}

bool ChunkTree::holds(Id id, std::int64_t layer) const {
  return present(id) && std::ranges::any_of(node(id).layers, [layer](const auto& rows) {
           return rows.layer == layer && rows.whole;
         });
}

std::size_t ChunkTree::pin_prefix(std::span<const Id> ids, std::span<const std::int64_t> layers) {
  const auto there = [&](Id id) {
    return present(id) &&
           std::ranges::all_of(layers, [&](std::int64_t layer) { return holds(id, layer); });
  };
  const auto end = std::ranges::find_if_not(ids, there);
  const auto count = static_cast<std::size_t>(end - ids.begin());
  for (const Id id : ids.first(count)) pin(id);
  return count;
}

void ChunkTree::pin(Id id) {
  Node& found = node(id);
  if (found.state == Node::State::kAbsent ||
      (found.state == Node::State::kDoomed && found.pins == 0)) {
    throw std::invalid_argument("chunk " + std::to_string(id) + " is not there");
  }
  touch(found);
  ++found.pins;
}

void ChunkTree::unpin(std::span<const Id> ids) {
  std::size_t taken_back = 0;
  try {
    for (const Id id : ids) {
      Node& found = node(id);
      if (found.pins < 1) {
        throw std::invalid_argument("chunk " + std::to_string(id) + " has no pin");
      }
      --found.pins;
      ++taken_back;
    }
  } catch (...) {
    for (const Id id : ids.first(taken_back)) ++node(id).pins;
    throw;
  }
  for (const Id id : ids) {
    // A number that stands there twice may be free by now.
    const Node::State state = nodes_[static_cast<std::size_t>(id)].state;
    if (state == Node::State::kDoomed) {
      end_doomed(id);
    } else if (state == Node::State::kPresent) {
      file(id);
    }
  }
}

std::vector<ChunkTree::Run> ChunkTree::runs(std::span<const Id> ids, std::int64_t layer) const {
  std::vector<Run> found;
  for (const Id id : ids) {
    const auto rows = std::ranges::find(node(id).layers, layer, &LayerRows::layer);
    if (rows == node(id).layers.end()) {
      throw std::out_of_range("chunk " + std::to_string(id) + " has no layer " +
                              std::to_string(layer));
    }
    if (found.empty() || found.back().format != rows->format) found.push_back({rows->format, {}});
    found.back().slots.push_back(rows->slot);
  }
  return found;
}

ChunkTree::Tickets ChunkTree::tickets(std::span<const Id> ids,
                                      std::span<const std::int64_t> layers) const {
  Tickets found;
  const auto collect = [&](const Filling& filling) {
    const auto brings = [&](const LayerRows& rows) {
      return !rows.whole && rows.format == filling.format &&
             std::ranges::find(layers, rows.layer) != layers.end() &&
             std::ranges::find(filling.slots, rows.slot) != filling.slots.end();
    };
    if (std::ranges::none_of(node(filling.id).layers, brings)) return;
    for (const auto& ticket : filling.tickets) {
      // Mostly the latest one.
      if (std::find(found.rbegin(), found.rend(), ticket) == found.rend()) found.push_back(ticket);
    }
  };
  for (const Id id : ids) {
    for (std::int32_t next = node(id).filling; next != kNone;) {
      const Filling& filling = fillings_[static_cast<std::size_t>(next)];
      collect(filling);
      next = filling.next;
    }
    if (const auto failed = failed_.find(id); failed != failed_.end()) {
      std::ranges::for_each(failed->second, collect);
    }
  }
  return found;
}

void ChunkTree::settle() {
  std::erase_if(transfers_, [this](const Transfer& transfer) {
    if (transfer.ticket->state() == Ticket::State::kPending) return false;
    for (const std::int32_t number : transfer.fillings) {
      if (--fillings_[static_cast<std::size_t>(number)].pending == 0) ended_.push_back(number);
    }
    return true;
  });
  while (!ended_.empty()) {
    const std::int32_t number = ended_.back();
    ended_.pop_back();
    Filling& filling = fillings_[static_cast<std::size_t>(number)];
    if (filling.id != kNone) {
      std::int32_t* link = &node(filling.id).filling;
      while (*link != number) link = &fillings_[static_cast<std::size_t>(*link)].next;
      *link = filling.next;
    }
    free_fillings_.push_back(number);
    end_filling(std::exchange(filling, {}));
  }
}

void ChunkTree::end_filling(Filling filling) {
  if (filling.id == kNone) {
    pool(filling.format).free(filling.slots);
    return;
  }
  const Id id = filling.id;
  Node& found = node(id);
  const bool done = std::ranges::all_of(
      filling.tickets, [](const auto& ticket) { return ticket->state() == Ticket::State::kDone; });
  if (done) {
    for (LayerRows& rows : found.layers) {
      rows.whole |= rows.format == filling.format &&
                    std::ranges::find(filling.slots, rows.slot) != filling.slots.end();
    }
    file(id);
  } else {
    // Who holds it must learn why.
    if (found.pins > 0) failed_[id].push_back(std::move(filling));
    if (found.state == Node::State::kPresent) {
      remove(id);
      return;
    }
  }
  end_doomed(id);
}

// --- slots ---------------------------------------------------------------------------------------

std::optional<std::vector<std::int64_t>> ChunkTree::allocate(int format, std::int64_t count) {
  SlotPool& from = pool(format);
  if (count > from.num_slots()) return std::nullopt;  // nothing goes for what will never fit
  auto slots = from.allocate(count);
  while (!slots) {
    if (evict() == kNone) return std::nullopt;
    slots = from.allocate(count);
  }
  const auto apart = [](std::int64_t slot, std::int64_t next) { return next != slot + 1; };
  if (std::ranges::adjacent_find(*slots, apart) == slots->end()) return slots;
  // What they take may be part of a run.
  from.free(*slots);
  const auto first = from.allocate_run(count);
  if (!first) return from.allocate(count);
  std::iota(slots->begin(), slots->end(), *first);
  return slots;
}

void ChunkTree::retire(int format, std::vector<std::int64_t> slots, const Tickets& tickets) {
  pool(format);
  check_tickets(tickets);
  start_filling({.id = kNone, .format = format, .slots = std::move(slots), .tickets = tickets});
  settle();
}

std::uint64_t ChunkTree::order_of(const Node& found) {
  return found.last_used | (found.reachable ? kReachable : 0);
}

// Puts a chunk among the candidates where it can go and is not among them. What becomes busy or
// gets a child later is found out when it comes up.
void ChunkTree::file(Id id) {
  Node& found = node(id);
  if (found.state != Node::State::kPresent || found.record != 0 || found.busy() ||
      found.first_child != kNone) {
    return;
  }
  if (++records_ == 0) ++records_;
  found.record = records_;
  candidates_.push_back({order_of(found), found.record, id});
  std::ranges::push_heap(candidates_, std::greater<>{});
  if (candidates_.size() <= 2 * static_cast<std::size_t>(num_present_) + kFewCandidates) return;
  std::erase_if(candidates_, [this](const Candidate& candidate) {
    return nodes_[static_cast<std::size_t>(candidate.id)].record != candidate.record;
  });
  std::ranges::make_heap(candidates_, std::greater<>{});
}

ChunkTree::Id ChunkTree::evict() {
  while (!candidates_.empty()) {
    std::ranges::pop_heap(candidates_, std::greater<>{});
    const Candidate next = candidates_.back();
    candidates_.pop_back();
    Node& found = nodes_[static_cast<std::size_t>(next.id)];
    if (found.record != next.record) continue;
    found.record = 0;
    // Filed again when it is a leaf that nobody needs.
    if (found.first_child != kNone || found.busy()) continue;
    if (order_of(found) != next.order) {
      file(next.id);
      continue;
    }
    remove(next.id);
    ++num_evicted_;
    return next.id;
  }
  return kNone;
}

}  // namespace hscache
