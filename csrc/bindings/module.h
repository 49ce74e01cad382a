// The parts of hidden_cache._native.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

namespace hscache {

// Ends an object without the GIL: that may take long, or wait for what needs it. The last owner may
// be a thread of ours, which does not have it.
struct EndWithoutGil {
  template <class T>
  void operator()(T* object) const {
    if (PyGILState_Check() == 0) {
      delete object;
      return;
    }
    const pybind11::gil_scoped_release others_run;
    delete object;
  }
};
template <class T>
using WithoutGil = std::unique_ptr<T, EndWithoutGil>;

// pack_tokens.
void bind_keys(pybind11::module_& module);
// Element, Arena, ArenaReader, SlotPool.
void bind_memory(pybind11::module_& module);
// ChunkTree.
void bind_chunks(pybind11::module_& module);
// ResultBuffer, ResultPool, PoolRows.
void bind_results(pybind11::module_& module);
// PagedView, Ticket, Registration, TransferEngine.
void bind_transfers(pybind11::module_& module);

}  // namespace hscache
