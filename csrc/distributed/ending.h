// Reports to the hooks of a group how its operations end.
//
// On the CPU the thread that completes a call reports it. One thread of the process polls calls on
// CUDA and works of the inner group every few milliseconds, and sleeps while there are none.
#pragma once

#include <c10/core/Event.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "../ops/posting.h"
#include "hooks.h"

namespace collx {

class Communicator;

namespace distributed {

/// Of the calls of one piece of work, which a communicator carries out in their order.
class Ending {
 public:
  Ending(std::shared_ptr<Hooks> hooks, std::shared_ptr<Communicator> communicator)
      : key(hooks->new_key()), hooks_(std::move(hooks)), communicator_(std::move(communicator)) {}

  const uint64_t key;

  /// Reports the end of the calls, the posted ones or, without any, those that have been enqueued
  /// on the current stream. Null during a capture, whose calls run when the graph is replayed.
  static std::shared_ptr<Ending> report(const std::shared_ptr<Hooks>& hooks,
                                        const std::shared_ptr<Communicator>& communicator,
                                        const std::vector<std::shared_ptr<PostedCall>>& posted);

  /// False while synchronous calls on CUDA have not completed on their stream.
  bool reached() const { return !event_ || event_->query(); }
  /// Runs the hooks for failures if it has: before the failure is raised.
  void before_raising() const;

 private:
  void mark();
  bool failed() const;

  const std::shared_ptr<Hooks> hooks_;
  const std::shared_ptr<Communicator> communicator_;
  std::optional<c10::Event> event_;  // CUDA
};

/// Reports the end of works of the inner group on a device, all of them together, by each key. Not
/// during a capture.
void report_end(std::shared_ptr<Hooks> hooks, std::vector<c10::intrusive_ptr<c10d::Work>> works,
                std::vector<uint64_t> keys, c10::Device device);

}  // namespace distributed
}  // namespace collx
