// What compiled programs call.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace jaxcoded {

// Operands: what orders the call (a token or a number), then int32 `skipped` if the attribute
// `skips`, bool ranks left out if `erases`, and the vectors. Results: the order, and the vectors.
XLA_FFI_Error* round_handler(XLA_FFI_CallFrame* frame);

// The parts of a round's vectors but the last ones, each ahead of the round itself. Operands: the
// order, int32 `skipped` if `skips`, and the vectors of one part. Result: the order.
XLA_FFI_Error* part_handler(XLA_FFI_CallFrame* frame);

// The next block of a round whose work is shared, and the last part of which follows. Operands: the
// order, and the vectors, of what was given before. Results: the order, and int32 (3,): the block, or
// -1 where there is no more, whether the vectors are to be zeros before it is added, and its `Audit`.
XLA_FFI_Error* take_handler(XLA_FFI_CallFrame* frame);

// Operand: a vector. Results: the slices of it that begin at the attribute `starts`.
XLA_FFI_Error* slices_handler(XLA_FFI_CallFrame* frame);

// A round without its result. Operands: those of a round. Results: the order, and the number by
// which the result is called for.
XLA_FFI_Error* start_handler(XLA_FFI_CallFrame* frame);

// Operands: the order, the number, and whatever is to be computed before. Results: the order, and
// the vectors.
XLA_FFI_Error* done_handler(XLA_FFI_CallFrame* frame);

// Operand: the order. Results: the order, and the lag as int32.
XLA_FFI_Error* lag_handler(XLA_FFI_CallFrame* frame);

// Operand: the order. Results: the order, and float32 with 1 for each block of the round before that
// this rank has computed.
XLA_FFI_Error* computed_handler(XLA_FFI_CallFrame* frame);

// The same in programs on several devices of this process, of which each makes the call: the first
// operand is int32, its place among so many `devices` of the mesh. Of each vector and place `owners`
// says who has the same, and brings it for both. For `patience` seconds they wait for each other.
XLA_FFI_Error* devices_round_handler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* devices_start_handler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* devices_done_handler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* devices_lag_handler(XLA_FFI_CallFrame* frame);

// The same where operands and results lie on a GPU.
XLA_FFI_Error* cuda_round_handler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* cuda_part_handler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* cuda_take_handler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* cuda_computed_handler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* cuda_lag_handler(XLA_FFI_CallFrame* frame);

}  // namespace jaxcoded
