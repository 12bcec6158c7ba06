// Calls a handler as XLA does for a GPU, with as much of XLA as the engine's handlers need.
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "xla/ffi/api/c_api.h"

struct XLA_FFI_Error {
  std::string text;
};

struct XLA_FFI_ExecutionContext {
  void* stream;
};

namespace {

XLA_FFI_Error* create(XLA_FFI_Error_Create_Args* args) { return new XLA_FFI_Error{args->message}; }
void message(XLA_FFI_Error_GetMessage_Args* args) { args->message = args->error->text.c_str(); }
void destroy(XLA_FFI_Error_Destroy_Args* args) { delete args->error; }
XLA_FFI_Error* stream(XLA_FFI_Stream_Get_Args* args) {
  args->stream = args->ctx->stream;
  return nullptr;
}

// Buffers of one axis, or of no axis if the length is negative.
struct Buffers {
  Buffers(int count, const int* dtypes, void* const* data, const std::int64_t* lengths)
      : dims(lengths, lengths + count), buffers(static_cast<std::size_t>(count)) {
    for (std::size_t i = 0; i < buffers.size(); ++i) {
      XLA_FFI_Buffer& it = buffers[i];
      std::memset(&it, 0, sizeof it);
      it.struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
      it.dtype = static_cast<XLA_FFI_DataType>(dtypes[i]);
      it.data = data[i];
      it.rank = dims[i] < 0 ? 0 : 1;
      it.dims = &dims[i];
      pointers.push_back(&it);
    }
  }

  std::vector<std::int64_t> dims;
  std::vector<XLA_FFI_Buffer> buffers;
  std::vector<void*> pointers;
};

}  // namespace

// Attributes are in the order of their names. `signature` is a string. `apart`, `examples` and `audits` are
// arrays, here without elements. The others are numbers.
extern "C" __attribute__((visibility("default"))) int call_handler(
    XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*), void* on, int operands, const int* operand_dtypes,
    void* const* operand_data, const std::int64_t* operand_lengths, int results,
    const int* result_dtypes, void* const* result_data, const std::int64_t* result_lengths,
    int attributes, const char* const* names, std::int64_t* values, const char* signature,
    char* text, std::size_t text_bytes) {
  XLA_FFI_Api api;
  std::memset(&api, 0, sizeof api);
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.api_version.struct_size = XLA_FFI_Api_Version_STRUCT_SIZE;
  api.api_version.major_version = XLA_FFI_API_MAJOR;
  api.api_version.minor_version = XLA_FFI_API_MINOR;
  api.XLA_FFI_Error_Create = create;
  api.XLA_FFI_Error_GetMessage = message;
  api.XLA_FFI_Error_Destroy = destroy;
  api.XLA_FFI_Stream_Get = stream;
  XLA_FFI_ExecutionContext context{on};

  Buffers in(operands, operand_dtypes, operand_data, operand_lengths);
  Buffers out(results, result_dtypes, result_data, result_lengths);
  std::vector<XLA_FFI_ArgType> in_types(in.pointers.size(), XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> out_types(out.pointers.size(), XLA_FFI_RetType_BUFFER);

  const auto count = static_cast<std::size_t>(attributes);
  std::vector<XLA_FFI_AttrType> types(count, XLA_FFI_AttrType_SCALAR);
  std::vector<XLA_FFI_ByteSpan> spans(count);
  std::vector<XLA_FFI_ByteSpan*> named(count);
  std::vector<XLA_FFI_Scalar> scalars(count);
  std::vector<void*> attrs(count);
  XLA_FFI_ByteSpan said{signature, std::strlen(signature)};
  XLA_FFI_Array apart{XLA_FFI_DataType_S64, 0, nullptr}, doubles{XLA_FFI_DataType_F64, 0, nullptr};
  for (std::size_t i = 0; i < count; ++i) {
    spans[i] = {names[i], std::strlen(names[i])};
    named[i] = &spans[i];
    scalars[i] = {XLA_FFI_DataType_S64, &values[i]};
    attrs[i] = &scalars[i];
    if (std::string(names[i]) == "signature") {
      types[i] = XLA_FFI_AttrType_STRING;
      attrs[i] = &said;
    } else if (std::string(names[i]) == "apart") {
      types[i] = XLA_FFI_AttrType_ARRAY;
      attrs[i] = &apart;
    } else if (std::string(names[i]) == "examples" || std::string(names[i]) == "audits") {
      types[i] = XLA_FFI_AttrType_ARRAY;
      attrs[i] = &doubles;
    }
  }

  XLA_FFI_CallFrame frame;
  std::memset(&frame, 0, sizeof frame);
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api;
  frame.ctx = &context;
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, operands, in_types.data(), in.pointers.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, results, out_types.data(), out.pointers.data()};
  frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, attributes,
                 types.data(), named.data(), attrs.data()};
  XLA_FFI_Error* error = handler(&frame);
  if (!error) return 0;
  std::strncpy(text, error->text.c_str(), text_bytes - 1);
  delete error;
  return 1;
}
