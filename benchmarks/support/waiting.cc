// MeasuredWait: x → x, after some seconds in which no core is used; it notes how long they were.
//
// A wait in Python takes the interpreter's lock to begin and to end, of which there is one for all
// devices: that time would be counted as the executor's. See benchmarks/support/waiting.py.

#include <time.h>

#include <atomic>
#include <chrono>

#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace {

constexpr int kNumClocks = 4096;
std::atomic<int64_t> waited_ns[kNumClocks];
std::atomic<int64_t> num_waits[kNumClocks];

class MeasuredWait : public tensorflow::OpKernel {
 public:
  explicit MeasuredWait(tensorflow::OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("seconds", &seconds_));
    OP_REQUIRES_OK(context, context->GetAttr("clock", &clock_));
    OP_REQUIRES(context, 0 <= clock_ && clock_ < kNumClocks,
                absl::InvalidArgumentError("clock is not in [0, 4096)"));
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    const auto start = std::chrono::steady_clock::now();
    timespec length;
    length.tv_sec = static_cast<time_t>(seconds_);
    length.tv_nsec = static_cast<long>((seconds_ - length.tv_sec) * 1e9);
    nanosleep(&length, nullptr);
    waited_ns[clock_] += std::chrono::nanoseconds(std::chrono::steady_clock::now() - start).count();
    num_waits[clock_] += 1;
    context->set_output(0, context->input(0));
  }

 private:
  float seconds_;
  int64_t clock_;
};

REGISTER_OP("MeasuredWait")
    .Input("x: T")
    .Output("y: T")
    .Attr("T: type")
    .Attr("seconds: float")
    .Attr("clock: int")
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* context) {
      context->set_output(0, context->input(0));
      return absl::OkStatus();
    });

REGISTER_KERNEL_BUILDER(Name("MeasuredWait").Device(tensorflow::DEVICE_CPU), MeasuredWait);

}  // namespace

extern "C" {

// Nanoseconds that the waits of a clock took together.
int64_t measured_wait_ns(int clock) { return waited_ns[clock]; }

// How many there were.
int64_t measured_wait_count(int clock) { return num_waits[clock]; }

void measured_wait_clear() {
  for (int clock = 0; clock < kNumClocks; ++clock) waited_ns[clock] = num_waits[clock] = 0;
}
}
