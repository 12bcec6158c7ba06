// A node on its own, for tests. Its wire is a Python object.
#include <cstring>
#include <stdexcept>
#include <utility>

#include "bindings.h"

namespace jaxcoded {
namespace {

std::span<const std::byte> span_of(const nb::bytes& data) {
  return {reinterpret_cast<const std::byte*>(data.c_str()), data.size()};
}

// `wire` has the methods send(to, message), fetch(from, what, round, piece, version, address, bytes) ->
// bytes of the piece, None if it is gone, or False if it will arrive later; direct(from), inline_bytes(to), now(),
// withdraw(what, first_valid), has_memory(bytes). If now() or send() raises a MemoryError, the node lacks memory.
class PythonWire : public Wire, Source {
 public:
  explicit PythonWire(nb::object wire) : wire_(std::move(wire)) {}

  Source& memory() override { return *this; }
  std::byte* allocate(std::size_t bytes) override {
    if (!nb::cast<bool>(wire_.attr("has_memory")(bytes))) throw std::bad_alloc();
    return heap.allocate(bytes);
  }
  void release(std::byte* data, std::size_t bytes) override { heap.release(data, bytes); }
  void send(Rank to, const Message& message) override {
    in_memory([&] { return wire_.attr("send")(to, bytes_of(Message::bytes(message.header, message.body))); });
  }
  Fetch fetch(Rank from, Object object, std::uint32_t piece, std::uint64_t address, std::byte* to,
              std::size_t bytes, Copy) override {
    nb::object data = wire_.attr("fetch")(from, static_cast<int>(object.what), object.round, piece,
                                          object.version, address, bytes);
    if (data.is_none()) return Fetch::gone;
    if (nb::isinstance<nb::bool_>(data)) return Fetch::pending;
    const auto contents = nb::cast<nb::bytes>(data);
    if (contents.size() != bytes) throw std::runtime_error("a piece of another length");
    std::memcpy(to, contents.c_str(), bytes);
    return Fetch::done;
  }
  void withdraw(Object::What what, Round first_valid) override {
    wire_.attr("withdraw")(static_cast<int>(what), first_valid);
  }
  std::size_t inline_bytes(Rank to) const override {
    return nb::cast<std::size_t>(wire_.attr("inline_bytes")(to));
  }
  bool direct(Rank from) const override { return nb::cast<bool>(wire_.attr("direct")(from)); }
  double now() const override {
    return nb::cast<double>(in_memory([&] { return wire_.attr("now")(); }));
  }

 private:
  template <class Call>
  static nb::object in_memory(Call call) {
    try {
      return call();
    } catch (const nb::python_error& error) {
      if (error.matches(PyExc_MemoryError)) throw std::bad_alloc();
      throw;
    }
  }

  nb::object wire_;
};

class LoneNode {
 public:
  LoneNode(Family family, Decoder decoder, Limits limits, nb::object wire)
      : wire_(std::move(wire)), node_(std::move(family), std::move(decoder), limits, wire_) {}

  // Pass the first `known` vectors with the call. If others follow, the test must complete the call after them.
  void submit(std::uint64_t fingerprint, std::string signature, std::string why_not, bool up,
              bool down, bool skipped, std::vector<bool> erased, const std::vector<Vector>& own,
              const std::vector<Vector>& out, std::size_t known,
              const std::vector<ApartTuple>& apart, std::pair<double, double> examples, bool lacks_memory,
              bool breaks_off) {
    const bool complete = known == own.size();
    auto addresses = pointers_of<const std::byte>(own);
    addresses.resize(known);
    Call call = {.fingerprint = fingerprint,
                 .signature = std::move(signature),
                 .why_not = std::move(why_not),
                 .up = up,
                 .down = down,
                 .skipped = skipped,
                 .lacks_memory = lacks_memory,
                 .message = segments_of(own),
                 .total = segments_of(out),
                 .own = std::move(addresses),
                 .out = complete ? pointers_of<std::byte>(out) : std::vector<std::byte*>(),
                 .complete = complete,
                 .erased = std::move(erased),
                 .apart = apart_of(apart),
                 .examples = {examples.first, examples.second},
                 .audits = {}};
    breaks_off ? node_.break_off(std::move(call)) : node_.submit(std::move(call));
  }
  void extend(const std::vector<Vector>& own) { node_.extend(pointers_of<const std::byte>(own)); }
  void complete(const std::vector<Vector>& out) { node_.complete(pointers_of<std::byte>(out)); }
  void deliver(Rank from, nb::bytes message) { node_.deliver(from, Message::from(span_of(message))); }
  // Begin a call with shared work.
  void share(std::uint64_t fingerprint, std::string signature, const std::vector<Vector>& total,
             const Audits& audits) {
    Call call;
    call.audits = audits;
    call.fingerprint = fingerprint;
    call.signature = std::move(signature);
    call.message = call.total = segments_of(total);
    call.complete = false;
    call.shared = true;
    node_.submit(std::move(call));
  }
  void come_for_block(const std::vector<Vector>& own) {
    node_.come_for_block(pointers_of<const std::byte>(own));
  }
  std::optional<std::tuple<Block, bool, int>> take_block() {
    const auto work = node_.take_block();
    if (!work) return {};
    return std::tuple(work->block, work->fresh, static_cast<int>(work->audit));
  }
  void arrived(Rank from, int what, Round round, std::uint32_t piece, nb::bytes data,
               std::uint64_t version) {
    node_.arrived(from, {static_cast<Object::What>(what), round, version}, piece, span_of(data));
  }
  nb::object read(int what, Round round, std::uint32_t piece, std::uint64_t version) const {
    const auto data = node_.read({static_cast<Object::What>(what), round, version}, piece);
    return data ? nb::object(bytes_of(*data)) : nb::none();
  }
  Node& node() { return node_; }

 private:
  PythonWire wire_;
  Node node_;
};

}  // namespace

void add_lone_node(nb::module_& module) {
  nb::class_<LoneNode>(module, "LoneNode")
      .def(nb::init<Family, Decoder, Limits, nb::object>())
      .def("submit", &LoneNode::submit, nb::arg("fingerprint"), nb::arg("signature"),
           nb::arg("why_not"), nb::arg("up"), nb::arg("down"), nb::arg("skipped"),
           nb::arg("erased"), nb::arg("own"), nb::arg("out"), nb::arg("known"),
           nb::arg("apart") = nb::list(), nb::arg("examples") = nb::make_tuple(0.0, 0.0),
           nb::arg("lacks_memory") = false, nb::arg("breaks_off") = false)
      .def("extend", &LoneNode::extend)
      .def("complete", &LoneNode::complete)
      .def("deliver", &LoneNode::deliver)
      .def("lack_memory", [](LoneNode& self, bool for_call) { self.node().lack_memory(for_call); },
           nb::arg("for_call") = false)
      .def("lost", [](LoneNode& self, Rank rank) { self.node().lost(rank); })
      .def("root_has_ended", [](LoneNode& self) { self.node().root_has_ended(); })
      .def("lost_message", [](LoneNode& self, Rank rank) { self.node().lost_message(rank); })
      .def("expect_state", [](LoneNode& self) { self.node().expect_state(); })
      .def("watch", [](LoneNode& self, bool whether) { self.node().watch(whether); })
      .def("decided", [](LoneNode& self) { return self.node().decided(); })
      .def("alike", [](LoneNode& self) { return self.node().alike(); })
      .def("overdue", [](LoneNode& self) { return self.node().overdue(); })
      .def("wakes_at", [](LoneNode& self) { return self.node().wakes_at(); })
      .def("share_blocks", [](LoneNode& self, const std::vector<std::vector<Rank>>& holders) {
        self.node().share_blocks(holders);
      })
      .def("division", [](LoneNode& self) { return self.node().division(); })
      .def("replay", [](LoneNode& self, const std::vector<DealtTuple>& rounds) {
        self.node().replay(dealt_in(rounds));
      })
      .def("share", &LoneNode::share, nb::arg("fingerprint"), nb::arg("signature"), nb::arg("total"),
           nb::arg("audits") = Audits())
      .def("come_for_block", &LoneNode::come_for_block)
      .def("take_block", &LoneNode::take_block)
      .def("no_more_blocks", [](LoneNode& self) { return self.node().no_more_blocks(); })
      .def("leave_call", [](LoneNode& self) { self.node().leave_call(); })
      .def("arrived", &LoneNode::arrived, nb::arg("from"), nb::arg("what"), nb::arg("round"),
           nb::arg("piece"), nb::arg("data"), nb::arg("version") = 0)
      .def("read", &LoneNode::read, nb::arg("what"), nb::arg("round"), nb::arg("piece"),
           nb::arg("version") = 0)
      .def("advance", [](LoneNode& self) { return self.node().advance(); })
      .def("outcome", [](LoneNode& self) { return static_cast<int>(self.node().outcome()); })
      .def("error", [](LoneNode& self) { return self.node().error(); })
      .def("lag", [](LoneNode& self) { return self.node().lag(); })
      .def("computes_with", [](LoneNode& self, double eps) { self.node().computes_with(eps); })
      .def("next_round", [](LoneNode& self) { return self.node().next(); })
      .def("computed", [](LoneNode& self) { return self.node().computed(); })
      .def("awaited_below", [](LoneNode& self) { return self.node().awaited_below(); })
      .def("frontier", [](LoneNode& self) { return self.node().frontier(); })
      .def("status", [](LoneNode& self) { return self.node().status(); })
      .def("standing", [](LoneNode& self) { return self.node().standing(); })
      .def("take_news", [](LoneNode& self) { return self.node().take_news(); })
      .def("waiting_for", [](LoneNode& self) { return self.node().waiting_for(); })
      .def("history_bytes", [](LoneNode& self) { return self.node().history_bytes(); })
      .def("memory_bytes", [](LoneNode& self) { return self.node().memory_bytes(); })
      .def("fetched_bytes", [](LoneNode& self) { return self.node().fetched_bytes(); })
      .def("questions", [](LoneNode& self) { return self.node().decoder().questions(); })
      .def("desynchronized", [](LoneNode& self) { return self.node().desynchronized(); })
      .def("keep_state", [](LoneNode& self, Round round, nb::bytes state) {
        self.node().keep_state(round, state_of(span_of(state)));
      })
      .def("ask_state", [](LoneNode& self) { self.node().ask_state(); })
      .def("state_round", [](LoneNode& self) { return self.node().state_round(); })
      .def("state_missing", [](LoneNode& self) { return self.node().state_missing(); })
      .def("state", [](LoneNode& self) { return bytes_of(self.node().take_state().all()); })
      .def("resume", [](LoneNode& self) { self.node().resume(); })
      .def("leave", [](LoneNode& self, const std::string& failure) { self.node().leave(failure); },
           nb::arg("failure") = "")
      .def("end", [](LoneNode& self) { self.node().end(); })
      .def("left", [](LoneNode& self) { return self.node().left(); })
      .def("give_up", [](LoneNode& self) { self.node().give_up(); })
      .def("absent", [](LoneNode& self) { return self.node().absent(); });
}

}  // namespace jaxcoded
