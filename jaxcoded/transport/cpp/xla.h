// The handlers that compiled programs call. Most have an *ordering operand* and an equal *ordering result*, a token
// or a number. A program passes the result on to the next call, so XLA keeps the order of the calls.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace jaxcoded {

// A round. Operands: the ordering operand, int32 `skipped` if the attribute `skips` is set, bools of the ranks
// left out if `erases` is set, and the vectors. Results: the ordering result and the vectors.
XLA_FFI_Error* round_handler(XLA_FFI_CallFrame* frame);

// A part of a round's vectors, before the round itself, which passes the last part. Operands: the ordering
// operand, int32 `skipped` if `skips` is set, and the vectors of the part. Result: the ordering result.
XLA_FFI_Error* part_handler(XLA_FFI_CallFrame* frame);

// The next block of a round with shared work. Operands: the ordering operand, and the vectors, to which the
// earlier blocks were added. Results: the ordering result, and int32 (3,): the block, or -1 if there are no more;
// whether the vectors must be zeros before the block is added; and the block's `Audit`.
XLA_FFI_Error* take_handler(XLA_FFI_CallFrame* frame);

// Slices of a vector. Operand: the vector. Results: its slices that begin at the positions `starts`, an attribute.
XLA_FFI_Error* slices_handler(XLA_FFI_CallFrame* frame);

// The start of a round. Operands: the same as of a round. Results: the ordering result, and the number with
// which `done_handler` asks for the round's result.
XLA_FFI_Error* start_handler(XLA_FFI_CallFrame* frame);

// The end of a started round. Operands: the ordering operand, the number, and values that must be computed before
// this call. Results: the ordering result and the vectors.
XLA_FFI_Error* done_handler(XLA_FFI_CallFrame* frame);

// The lag. Operand: the ordering operand. Results: the ordering result, and the lag as int32.
XLA_FFI_Error* lag_handler(XLA_FFI_CallFrame* frame);

// The computed blocks. Operand: the ordering operand. Results: the ordering result, and a float32 vector with 1
// for each block of the previous round that this rank has computed.
XLA_FFI_Error* computed_handler(XLA_FFI_CallFrame* frame);

// The same for programs on several devices of this process, each of which makes the call. The first operand is an
// int32: the device's place among the `devices` of the mesh. `owners` names, for each vector and place, the device
// that brings the vector for all devices with equal vectors. Devices wait `patience` seconds for each other.
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
