// Reports the completion or failure of operations to the hooks of a group.
//
// On the CPU, the thread that completes a call reports it. For CUDA calls and for works of the
// inner group, one thread of the process polls every few milliseconds. It sleeps while there are
// none.
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

/// The end of the calls of one work object, which a communicator executes in order.
class Ending {
 public:
  Ending(std::shared_ptr<Hooks> hooks, std::shared_ptr<Communicator> communicator)
      : key(hooks->new_key()), hooks_(std::move(hooks)), communicator_(std::move(communicator)) {}

  const uint64_t key;

  /// Reports the end of the posted calls or, if there are none, of the calls that have been
  /// enqueued on the current stream. Returns null during a capture, whose calls run when the graph
  /// is replayed.
  static std::shared_ptr<Ending> report(const std::shared_ptr<Hooks>& hooks,
                                        const std::shared_ptr<Communicator>& communicator,
                                        const std::vector<std::shared_ptr<PostedCall>>& posted);

  /// Returns false while CUDA calls have not completed on their stream.
  bool reached() const { return !event_ || event_->query(); }
  /// Called before a failure is raised. Runs the failure hooks if the communicator has failed.
  void before_raising() const;

 private:
  void mark();
  bool failed() const;

  const std::shared_ptr<Hooks> hooks_;
  const std::shared_ptr<Communicator> communicator_;
  std::optional<c10::Event> event_;  // CUDA
};

/// Reports, for each key, the end of works of the inner group on a device after all of them have
/// ended. Does nothing during a capture.
void report_end(std::shared_ptr<Hooks> hooks, std::vector<c10::intrusive_ptr<c10d::Work>> works,
                std::vector<uint64_t> keys, c10::Device device);

}  // namespace distributed
}  // namespace collx
