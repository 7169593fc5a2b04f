#include <cuda_runtime_api.h>

#include <utility>

#include "copy_streams.h"
#include "launch.h"

namespace collx::cuda {

namespace {

cudaEvent_t make_event() {
  cudaEvent_t event = nullptr;
  require(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event");
  return event;
}

}  // namespace

CopyStreams::~CopyStreams() {
  // None of these waits, and what they return at the interpreter's exit is of no use.
  for (const cudaEvent_t event : {entered_, forked_}) {
    if (event != nullptr) (void)cudaEventDestroy(event);
  }
  for (const Branch& branch : branches_) {
    if (branch.done != nullptr) (void)cudaEventDestroy(branch.done);
    if (branch.stream != nullptr) (void)cudaStreamDestroy(branch.stream);
  }
}

cudaEvent_t CopyStreams::entering() {
  if (entered_ == nullptr) entered_ = make_event();
  entering_ = true;
  return entered_;
}

void CopyStreams::hold(Stream other) {
  if (!std::exchange(entering_, false)) return;
  require(cudaStreamWaitEvent(other, entered_, 0), "ordering a stream");
}

void CopyStreams::fork(Stream stream, int branches) {
  stream_ = stream;
  used_ = branches - 1;
  if (used_ <= 0) return;
  if (forked_ == nullptr) forked_ = make_event();
  require(cudaEventRecord(forked_, stream), "forking a stream");
  for (int i = 0; i < used_; ++i) {
    Branch& branch = branches_[i];
    if (branch.stream == nullptr) {
      require(cudaStreamCreateWithFlags(&branch.stream, cudaStreamNonBlocking), "making a stream");
      branch.done = make_event();
    }
    require(cudaStreamWaitEvent(branch.stream, forked_, 0), "forking a stream");
  }
}

void CopyStreams::join() {
  for (int i = 0; i < used_; ++i) {
    require(cudaEventRecord(branches_[i].done, branches_[i].stream), "joining a stream");
    require(cudaStreamWaitEvent(stream_, branches_[i].done, 0), "joining a stream");
  }
}

}  // namespace collx::cuda
