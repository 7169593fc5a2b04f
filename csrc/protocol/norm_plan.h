// The plan of a fused normalization: the algorithm, and the distribution of rows over blocks and
// slots. These are pure functions of values that all ranks agree on.
//
// The blocks of a cluster share a row. Each block takes a piece of the row, one vector for each
// thread, and keeps it in registers from the reduction to the last store. A longer row takes
// several steps; between them its sums are spilled to memory. The same applies to rows longer than
// a block on hardware without clusters.
#pragma once

#include "call.h"
#include "selection.h"

namespace collx {

/// The results of a call, for the plan and for the data that ranks pass on.
struct NormResults {
  bool residual = false;
  bool normalized = false;
  bool quantized = false;
};

/// The smallest input, in elements, for which it is faster that every rank finishes all rows.
inline constexpr uint64_t kSumsFrom = 2 << 20;

/// Whether an owner of rows pushes the sums to all ranks, which then finish the rows, instead of
/// the results. This pays if the results have at least twice the bytes of the sums, which the
/// parity modes round, and if the links bound the time of the call.
constexpr bool passes_sums(const NormOptions& o, const NormResults& r, DType dtype,
                           uint64_t elements) {
  return o.rounding != Rounding::fp32 && r.residual && r.normalized && dtype_size(dtype) == 2 &&
         elements >= kSumsFrom;
}

struct NormRequest : Request {
  uint64_t rows = 0;
  uint64_t cols = 0;
  NormOptions options;
  NormResults results;
  // The grid that a tuner requests; 0: none.
  int tuned_blocks = 0;
  int tuned_threads = 0;  // of a block, a power of two
};

/// The two-shot variant that passes the fewest bytes.
constexpr Algorithm sums_or_results(const NormRequest& r, Algorithm algorithm) {
  const bool sums = algorithm == Algorithm::twoshot_push &&
                    passes_sums(r.options, r.results, r.dtype, r.rows * r.cols);
  return sums ? Algorithm::twoshot_push_sums : algorithm;
}

/// The layout of a piece's results (one vector for each thread) in its tiles when the owner passes
/// them on. Offsets are bytes from the first tile. `element`: bytes of the dtype.
struct RowPlanes {
  uint32_t residual;
  uint32_t normalized;
  uint32_t quantized;
  uint32_t scales;  // words, float32

  COLLX_HD constexpr RowPlanes(uint32_t threads, bool has_residual, bool has_normalized,
                               uint32_t element) {
    const uint32_t plane = threads * kVectorBytes;
    residual = 0;
    normalized = has_residual ? plane : 0;
    quantized = normalized + (has_normalized ? plane : 0);
    scales = quantized + plane / element;
  }
};

namespace detail {

constexpr uint32_t power_of_two(uint64_t n, uint32_t least, uint32_t most) {
  uint32_t power = least;
  while (power < n && power < most) power *= 2;
  return power;
}

/// Bytes of slots that a piece takes when its owner passes on its results.
constexpr uint32_t passed_bytes(const NormShape& s, const NormRequest& r, Algorithm algorithm) {
  const auto element = static_cast<uint32_t>(dtype_size(r.dtype));
  if (algorithm == Algorithm::twoshot_push_sums) return s.threads * kVectorBytes;
  const RowPlanes planes(s.threads, r.results.residual, r.results.normalized, element);
  if (!r.results.quantized) return planes.quantized;
  if (r.options.scale_mode == ScaleMode::tensor) return planes.scales;
  if (r.options.scale_mode == ScaleMode::row) return planes.scales + kVectorBytes;
  // A word for each smallest group is more than any call needs.
  return planes.scales + s.threads * (kVectorBytes / element) / kSmallestGroup * 4;
}

/// Clusters of a shape that are resident at once in a share of the device. The share is `blocks`
/// blocks of kFullBlock threads.
constexpr uint64_t clusters_held(const NormRequest& r, const NormShape& s, int blocks) {
  const Residency& device = r.capabilities.residency;
  const uint64_t all = device.clusters(kFullBlock, 1);
  const uint64_t share = at_most(static_cast<uint64_t>(blocks), all);
  return at_most(device.clusters(s.threads, s.cluster) * share / all, kMaxBlocks / s.cluster);
}

}  // namespace detail

/// Whether groups of columns are wider than a warp. Sums over such a group stay within a block.
constexpr bool has_wide_groups(const NormOptions& o, uint32_t elements) {
  return o.quantization != Quantization::none && o.scale_mode == ScaleMode::group &&
         static_cast<uint32_t>(o.quant_group_size) > kWarpLanes * elements;
}

/// Whether each rank owns a part of the rows and processes only those.
constexpr bool owns_rows(Collective c, Algorithm a) {
  return row_of(a).share == Share::part || scatters_rows(c);
}

/// The rows that a grid processes: all rows, or those of the largest part.
constexpr uint64_t rows_to_do(Collective c, Algorithm a, uint64_t rows, int world) {
  return owns_rows(c, a) ? largest_part(rows, world) : rows;
}

/// `tiles`: tiles of the slots, or of the memory through which results pass; 0 if there is none.
constexpr NormShape norm_shape(const NormRequest& r, Algorithm algorithm, uint32_t tiles) {
  const auto element = static_cast<uint32_t>(dtype_size(r.dtype));
  const uint32_t elements = kVectorBytes / element;
  const uint64_t vectors = ceil_div<uint64_t>(r.cols, elements);
  const bool owned = row_of(algorithm).share == Share::part;
  const uint64_t rows = rows_to_do(r.collective, algorithm, r.rows, r.world);

  NormShape s;
  const bool together = has_wide_groups(r.options, elements);
  uint32_t most_cluster = together ? 1 : kMostCluster;
  // Neither the call's bound nor the communicator's share of the device may be exceeded.
  const auto most_blocks =
      static_cast<uint32_t>(r.max_blocks > 0 && r.max_blocks < r.room ? r.max_blocks
                            : r.room > 1                              ? r.room
                                                                      : 1);
  const Residency& device = r.capabilities.residency;
  while (most_cluster > most_blocks ||
         (most_cluster > 1 && device.clusters(kFullBlock, most_cluster) == 0)) {
    most_cluster /= 2;
  }
  // Few rows are spread over clusters; many rows fill the device without them.
  const uint32_t wished = rows <= 8 ? kMostCluster : rows <= 32 ? 4 : 1;
  s.cluster = detail::power_of_two(ceil_div<uint64_t>(vectors, kTileVectors), 1,
                                   wished < most_cluster ? wished : most_cluster);
  if (r.tuned_threads > 0) {
    s.cluster = detail::power_of_two(ceil_div<uint64_t>(vectors, r.tuned_threads), 1, most_cluster);
  }
  s.threads =
      detail::power_of_two(ceil_div<uint64_t>(vectors, s.cluster), kTileVectors, kFullBlock);
  while (vectors > s.step_vectors() && s.cluster < most_cluster) s.cluster *= 2;
  if (vectors > s.step_vectors()) s.cluster = 1;  // one block does the steps of a row

  const auto tiles_of_row = [&] {
    const uint32_t own = s.threads / kTileVectors;
    const uint32_t passed = owned ? ceil_div(detail::passed_bytes(s, r, algorithm), kTileBytes) : 0;
    s.piece_tiles = own > passed ? own : passed;
    return s.piece_tiles * s.cluster;
  };
  while (tiles_of_row() > tiles && tiles > 0 && !owned) {  // few slots need smaller steps
    if (s.cluster > 1) {
      s.cluster = 1;
    } else {
      s.threads /= 2;
    }
  }
  s.steps = static_cast<uint32_t>(ceil_div<uint64_t>(vectors, s.step_vectors()));
  s.rows_per_use = tiles / (s.piece_tiles * s.cluster);
  return s;
}

struct NormPlan {
  Plan plan;
  NormShape shape;
  uint64_t spilled = 0;  // elements of NormCall::spill
};

/// Rows that fit neither into the memory through which an algorithm passes them nor into registers
/// are pushed to every rank.
constexpr NormPlan plan_norm(const NormRequest& r, const CudaLayout& layout) {
  NormPlan p;
  p.plan.named = p.plan.algorithm = select_algorithm(r);
  p.plan.staged = stages_inputs(r, p.plan.algorithm);
  if (r.device == DeviceKind::cpu) return p;
  Algorithm& runs = p.plan.algorithm;
  runs = sums_or_results(r, runs);
  const auto element = static_cast<uint64_t>(dtype_size(r.dtype));
  const uint64_t row_bytes = round_up<uint64_t>(r.cols * element, kVectorBytes);
  if (pushes_into_slots(runs) && owns_rows(Collective::none, runs)) {
    p.shape = norm_shape(r, runs, layout.twoshot.tiles);
  } else if (runs == Algorithm::twoshot_pull || runs == Algorithm::multimem_twoshot) {
    const bool passes_results = row_of(runs).results;
    const uint64_t tiles = passes_results ? layout.result_bytes / kTileBytes : 0;
    p.shape = norm_shape(r, runs, static_cast<uint32_t>(tiles));
    const uint64_t staged = layout.staging_bytes / (row_bytes * static_cast<uint64_t>(r.world));
    if (!passes_results || (p.plan.staged && p.shape.rows_per_use > staged)) {
      p.shape.rows_per_use = static_cast<uint32_t>(staged);
    }
  } else if (runs == Algorithm::oneshot_pull) {
    p.shape = norm_shape(r, runs, 0);
    p.shape.rows_per_use = static_cast<uint32_t>(p.plan.staged ? layout.staging_bytes / row_bytes
                                                               : detail::at_most(r.rows, 1u << 30));
  }
  if (!has_kernels(runs)) {
    p.shape = norm_shape(r, runs, 0);
  } else if (p.shape.rows_per_use == 0 || p.shape.steps > 1 || runs == Algorithm::oneshot_push ||
             runs == Algorithm::staged) {
    runs = Algorithm::oneshot_push;
    p.shape = norm_shape(r, runs, layout.oneshot.tiles);
    if (p.shape.rows_per_use < r.rows) {
      p.shape = norm_shape(r, runs, layout.twoshot.tiles);
      p.shape.large_slots = true;
      // Half of a piece lies in each stage.
      if (p.shape.piece_tiles % 2 == 0) {
        p.shape.piece_tiles /= 2;
        p.shape.rows_per_use = layout.twoshot.tiles / (p.shape.piece_tiles * p.shape.cluster);
      }
    }
  }

  const NormShape& s = p.shape;
  uint64_t rows = rows_to_do(r.collective, runs, r.rows, r.world);
  if (has_kernels(runs)) rows = detail::at_most(rows, s.rows_per_use);
  const bool push = pushes_into_slots(runs);
  const auto held = [&](int blocks) { return detail::clusters_held(r, s, blocks); };
  uint64_t clusters = held(r.room + (push ? r.spare_room : 0));
  // Blocks of another communicator may occupy multiprocessors that a cluster needs together.
  const bool alone = push && r.spare_room > 0;
  if (s.cluster > 2 && !alone) clusters /= 2;
  if (r.tuned_blocks > 0) {
    clusters = detail::at_most(r.capabilities.residency.clusters(s.threads, s.cluster),
                               static_cast<uint64_t>(r.tuned_blocks) / s.cluster);
  }
  if (r.max_blocks > 0) {
    clusters = detail::at_most(clusters, static_cast<uint64_t>(r.max_blocks) / s.cluster);
  }
  if (clusters == 0) clusters = 1;
  // Uses are whole rounds of an agreed number of clusters, so that no cluster has an extra row.
  const uint64_t round = held(2 * r.room);
  if (push && round > 0 && s.rows_per_use > round) {
    p.shape.rows_per_use = static_cast<uint32_t>(s.rows_per_use / round * round);
  }
  if (s.steps > 1) {  // a block does one long row at a time; this is equal on every rank
    rows = detail::at_most(rows, detail::at_most(held(r.room), clusters));
    p.shape.rows_per_use = static_cast<uint32_t>(rows > 0 ? rows : 1);
  }
  p.plan.threads = static_cast<int32_t>(s.threads);
  p.plan.blocks = static_cast<int32_t>(s.cluster) *
                  detail::clamp_blocks(detail::at_most(rows, clusters), clusters);
  if (s.steps > 1) {
    p.spilled = static_cast<uint64_t>(p.plan.blocks) * s.steps * s.step_vectors() *
                (kVectorBytes / element);
  }
  return p;
}

}  // namespace collx
