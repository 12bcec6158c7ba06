// The handlers that compiled programs call.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace jaxcoded {

// Operands: a value that orders the call (a token or a number), then int32 `skipped` if the attribute
// `skips`, bool ranks left out if `erases`, and the vectors. Results: the order, and the vectors.
XLA_FFI_Error* round_handler(XLA_FFI_CallFrame* frame);

// All parts of a round's vectors except the last, each before the round itself. Operands: the
// order, int32 `skipped` if `skips`, and the vectors of one part. Result: the order.
XLA_FFI_Error* part_handler(XLA_FFI_CallFrame* frame);

// The next block of a round with shared work, whose last part follows. Operands: the order, and the
// vectors of the blocks given before. Results: the order, and int32 (3,): the block, or -1 if there are
// no more; whether the vectors must be zeros before it is added; and its `Audit`.
XLA_FFI_Error* take_handler(XLA_FFI_CallFrame* frame);

// Operand: a vector. Results: the slices of it that begin at the attribute `starts`.
XLA_FFI_Error* slices_handler(XLA_FFI_CallFrame* frame);

// A round without its result. Operands: those of a round. Results: the order, and the number by
// which `done_handler` asks for the result.
XLA_FFI_Error* start_handler(XLA_FFI_CallFrame* frame);

// Operands: the order, the number, and values that must be computed before. Results: the order, and
// the vectors.
XLA_FFI_Error* done_handler(XLA_FFI_CallFrame* frame);

// Operand: the order. Results: the order, and the lag as int32.
XLA_FFI_Error* lag_handler(XLA_FFI_CallFrame* frame);

// Operand: the order. Results: the order, and float32 with 1 for each block of the previous round that
// this rank has computed.
XLA_FFI_Error* computed_handler(XLA_FFI_CallFrame* frame);

// The same in programs on several devices of this process, each of which makes the call. The first operand is
// int32: the device's place among the `devices` of the mesh. `owners` names, for each vector and place, the
// device that brings the vector for all devices that have the same. The devices wait for each other for
// `patience` seconds.
XLA_FFI_Error* devices_round_handler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* devices_start_handler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* devices_done_handler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* devices_lag_handler(XLA_FFI_CallFrame* frame);

// The same if operands and results lie on a GPU.
XLA_FFI_Error* cuda_round_handler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* cuda_part_handler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* cuda_take_handler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* cuda_computed_handler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* cuda_lag_handler(XLA_FFI_CallFrame* frame);

}  // namespace jaxcoded
