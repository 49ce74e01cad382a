// A transfer whose end is in the test's hand.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "core/transfer_engine.h"
#include "tests/requests.h"
#include "tests/scripted_runtime.h"

namespace hscache::test {

// One row, on its way until end().
class HeldTransfer {
 public:
  HeldTransfer() {
    TransferRequest gather{.direction = Direction::kGather,
                           .paged = cache().view().layers(0, 1),
                           .block_ids = {0},
                           .pieces = {{.start = 0, .length = 1, .layers = {rows_.data()}}}};
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

  std::vector<std::byte> rows_ = std::vector<std::byte>(kRowBytes);
  std::shared_ptr<Script> script_ = std::make_shared<Script>();
  TransferEngine engine_{script_->runtime(), {}, /*threaded=*/false};
  std::shared_ptr<Ticket> ticket_;
};

}  // namespace hscache::test
