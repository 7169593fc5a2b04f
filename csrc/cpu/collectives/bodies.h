// Maps each algorithm of a collective to its function, one row each. If algorithms.h or the
// selection names an algorithm without a function, compilation fails.
#pragma once

#include <stdexcept>
#include <string>

#include "../../protocol/names.h"
#include "../../protocol/selection.h"

namespace collx::cpu {

template <typename Steps>
struct Body {
  Algorithm algorithm;
  Collectives serves;
  Steps steps;
};

template <typename Steps, size_t N>
constexpr const Body<Steps>* find_body(const Body<Steps> (&bodies)[N], Collective c, Algorithm a) {
  for (const Body<Steps>& body : bodies) {
    if (body.algorithm == a && (body.serves & only(c)) != 0) return &body;
  }
  return nullptr;
}

template <typename Steps, size_t N>
constexpr bool are_complete(const Body<Steps> (&bodies)[N], Collectives collectives) {
  return is_complete(DeviceKind::cpu, collectives,
                     [&](Collective c, Algorithm a) { return find_body(bodies, c, a) != nullptr; });
}

template <typename Steps, size_t N>
Steps require_body(const Body<Steps> (&bodies)[N], Collective c, Algorithm a) {
  const Body<Steps>* const body = find_body(bodies, c, a);
  if (body != nullptr) return body->steps;
  throw std::invalid_argument("algorithm " + std::string(name_of(a)) + " of " +
                              std::string(name_of(c)) + " has no CPU kernel");
}

}  // namespace collx::cpu
