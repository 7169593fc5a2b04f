// Every form in which a collective can be called on the CPU, from the tables of csrc/protocol.
#pragma once

#include <vector>

#include "protocol/selection.h"

namespace collx::cpu {

struct Form {
  Collective collective;
  Algorithm algorithm;
  bool symmetric;
  bool device_splits = false;
};

inline std::vector<Form> forms_of(Collectives collectives) {
  std::vector<Form> forms;
  for (const CollectiveRow& row : kCollectives) {
    const Collective c = row.collective;
    for (const AlgorithmRow& algorithm : kAlgorithms) {
      const Algorithm a = algorithm.algorithm;
      if (a == Algorithm::automatic || a == Algorithm::fallback || algorithm.multicast) continue;
      if ((collectives & algorithm.serves & only(c)) == 0) continue;
      if (!needs_symmetric(a)) forms.push_back({c, a, false});
      // Some algorithms work differently on symmetric tensors. On the CPU, lanes never do.
      const bool may =
          algorithm.staging || (c == Collective::broadcast && !algorithm.lanes) || row.scatters;
      if (needs_symmetric(a) || may) forms.push_back({c, a, true});
      if (row.counted) forms.push_back({c, a, needs_symmetric(a), true});
    }
  }
  return forms;
}

/// Returns the plan that the selection makes for a call of the form.
inline Plan plan_of(const Form& form, DType dtype, uint64_t bytes, int world, bool in_place) {
  Request request;
  request.collective = form.collective;
  request.dtype = dtype;
  request.bytes = bytes;
  request.world = world;
  request.input_symmetric = request.output_symmetric = form.symmetric;
  request.in_place = in_place;
  request.algorithm = form.algorithm;
  return select(request);
}

}  // namespace collx::cpu
