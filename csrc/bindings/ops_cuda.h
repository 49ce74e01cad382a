// The operators' backend for tensors in GPU memory.
#pragma once

#include "bindings/op_arguments.h"

namespace hscache::ops {

// Launches on the current stream and waits for nothing, except to copy ids that lie on the host.
struct Cuda {
  // Where the tokens lie, and what owns the ids.
  struct Tokens {
    TokenMap map;
    Tensor ids;
  };
  // Ids on the host are checked and copied; ids on the device are checked by the kernel, and what
  // an earlier kernel found wrong is raised here (std::out_of_range), outside of capture.
  static Tokens tokens(const PagedView& view, const Tensor& paged, const Tensor& ids,
                       const char* name, std::int64_t start, std::int64_t length, bool slots);
  static void move(Direction direction, const RowsTask& task, const Tensor& paged);
};

}  // namespace hscache::ops
