// Moving the rows of a task on the calling thread: what a kernel does, in a loop.
#pragma once

#include <cstdint>

#include "core/rows_task.h"

namespace hscache {

// Checks that there is an id for each of `length` tokens, without reading any. Throws
// std::invalid_argument (negative start or length, a view that makes no sense) or
// std::out_of_range.
void check_reach(const PagedView& paged, const TokenMap& tokens, std::int64_t length);

// As check_reach(), and checks that the ids lie inside `paged`. Padding in a slot mapping is
// allowed.
void check_tokens(const PagedView& paged, const TokenMap& tokens, std::int64_t length);

// Moves all rows of a task whose tokens were checked, or which has a word for bad ids. The rows
// must not overlap the paged memory.
//
// A gather fills rows of padding with zeros and rows of bad ids with bytes 0xFF (NaN in every float
// type, -1 in integers); a scatter leaves both alone.
void move_rows(Direction direction, const RowsTask& task);

}  // namespace hscache
