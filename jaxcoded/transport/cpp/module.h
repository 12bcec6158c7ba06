// Definitions that several sources of the Python module use.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "node.h"

namespace jaxcoded {

namespace nb = nanobind;

// A vector as Python hands it over: dtype, elements, address.
using Vector = std::tuple<int, std::uint64_t, std::uint64_t>;

inline std::vector<Segment> segments_of(const std::vector<Vector>& vectors) {
  std::vector<Segment> out;
  for (const auto& [dtype, count, address] : vectors) out.push_back({static_cast<DType>(dtype), count});
  return out;
}

template <class T>
std::vector<T*> pointers_of(const std::vector<Vector>& vectors) {
  std::vector<T*> out;
  for (const auto& vector : vectors) out.push_back(reinterpret_cast<T*>(std::get<2>(vector)));
  return out;
}

// Elements to compare separately: vector, first element, number of elements, kind.
using ApartTuple = std::tuple<std::size_t, std::uint64_t, std::uint64_t, int>;

inline std::vector<Apart> apart_of(const std::vector<ApartTuple>& runs) {
  std::vector<Apart> out;
  for (const auto& [vector, first, count, kind] : runs) out.push_back({vector, first, count, kind});
  return out;
}

// How the work of rounds is divided: round, call in words, blocks by member (the root is the first).
using DealtTuple = std::tuple<Round, std::string, Division>;

inline std::vector<Dealt> dealt_in(const std::vector<DealtTuple>& rounds) {
  std::vector<Dealt> out;
  for (const auto& [round, call, division] : rounds) out.push_back({round, call, division});
  return out;
}

inline nb::bytes bytes_of(std::span<const std::byte> data) {
  return nb::bytes(reinterpret_cast<const char*>(data.data()), data.size());
}

inline State state_of(std::span<const std::byte> data) {
  State out(data.size());
  if (!data.empty()) std::memcpy(out.data(), data.data(), data.size());
  return out;
}

}  // namespace jaxcoded
