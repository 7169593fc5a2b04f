#include <cuda_runtime_api.h>

#include "copy_streams.h"
#include "launch.h"

namespace collx::cuda {

namespace {

cudaEvent_t made(cudaEvent_t& event) {
  if (event == nullptr) {
    require(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event");
  }
  return event;
}

/// Orders all later work on `after` after the work that is on `before` now.
void order(Stream before, Stream after, cudaEvent_t& event) {
  require(cudaEventRecord(made(event), before), "ordering streams");
  require(cudaStreamWaitEvent(after, event, 0), "ordering streams");
}

}  // namespace

CopyStreams::~CopyStreams() {
  // None of these calls waits. Errors at the exit of the interpreter are ignored.
  for (const cudaEvent_t event : {entered_, forked_, joined_}) {
    if (event != nullptr) (void)cudaEventDestroy(event);
  }
  for (const Stream second : {eager_, captured_}) {
    if (second != nullptr) (void)cudaStreamDestroy(second);
  }
}

cudaEvent_t CopyStreams::entered() { return made(entered_); }

void CopyStreams::hold(Stream other) {
  require(cudaStreamWaitEvent(other, entered_, 0), "ordering streams");
}

Stream CopyStreams::second(Stream stream) {
  auto status = cudaStreamCaptureStatusNone;
  require(cudaStreamIsCapturing(stream, &status), "reading the state of a stream");
  Stream& second = status == cudaStreamCaptureStatusNone ? eager_ : captured_;
  if (second == nullptr) {
    require(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking), "making a stream");
  }
  return second;
}

Stream CopyStreams::fork(Stream stream) {
  const Stream other = second(stream);
  order(stream, other, forked_);
  return other;
}

void CopyStreams::join(Stream stream) { order(second(stream), stream, joined_); }

}  // namespace collx::cuda
