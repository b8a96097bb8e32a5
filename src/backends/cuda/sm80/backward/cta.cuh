// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <type_traits>

#include "backends/cuda/device/delay.cuh"
#include "backends/cuda/ptx/address.cuh"
#include "backends/cuda/ptx/cp_async.cuh"
#include "backends/cuda/sm80/backward/live_row_tiles.cuh"
#include "backends/cuda/sm80/backward/row_scales.cuh"
#include "backends/cuda/sm80/backward/store_tile.cuh"
#include "backends/cuda/sm80/backward/traits.cuh"
#include "backends/cuda/sm80/backward/warp_mask.cuh"
#include "backends/cuda/sm80/common/operands.cuh"

namespace flashmask::sm80::bwd {

/// A CTA of the backward kernel. It claims key tiles, one after the other, and goes through the row tiles that see
/// each of them, under all query heads of a head group:
///   S = Q K^T, dP = dO V^T, P = exp2(S scale - lse), dS = P (dP - delta), dV += P^T dO, dK += dS^T Q, dQ = dS K.
/// dK and dV stay in registers, P and dS go through shared memory, dQ is added to its sums in global memory.
///
/// The next row tile's loads arrive under this one's products if there are two buffers, and else under dQ's product,
/// which reads neither Q nor dO. The barriers, each of all threads:
///
///   barrier              says that this is there       and that this is done, and what follows may overwrite it
///   twice, where V lies  V's columns in registers      reading them from the buffers of Q and dO
///   in registers, too
///   before the scores    Q, dO and RowTerms, and for   reading P and dS, and Q and dO where they have two buffers
///                        a new work tile K and V
///   after the scores     P and dS                      -
///   before dQ, where dO  -                             reading Q and dO
///   has one buffer
///   after the last tile  -                             reading all
///   around a claim       the claimed work tile         reading the one before
template <typename Traits>
class BackwardCta {
 public:
  using Params = typename Traits::Params;
  using Shared = SharedStorage<Traits>;
  __device__ __forceinline__ BackwardCta(const Params& p, Shared& shared)
      : p_(p), shared_(shared), warp_(static_cast<int>(ptx::uniform(threadIdx.x / 32))), weights_(p) {}

  __device__ __forceinline__ void run() {
    for (uint32_t n = claim(); n < p_.schedule.work_tiles; n = claim())
      run_work_tile(cuda::WorkTilePlace(p_.schedule, p_.head_groups, n));
  }

 private:
  using Element = typename Traits::Element;
  using QTile = typename Traits::QTile;
  using DoutTile = typename Traits::DoutTile;
  using KTile = typename Traits::KTile;
  using VTile = typename Traits::VTile;
  using SharedVTile = typename Traits::SharedVTile;
  using ScoreTile = typename Traits::ScoreTile;
  using ScoreGrid = typename Traits::ScoreGrid;
  using Scores = typename ScoreGrid::Fragments;
  using Dk = typename Traits::DkGrid::Fragments;
  using Dv = typename Traits::DvGrid::Fragments;
  using Mask = WarpMask<16 * ScoreGrid::kSlabs, 16 * ScoreGrid::kPieces>;
  static constexpr int kThreads = Traits::kThreads;

  /// V's first columns, which some tiles keep in registers as the operand of dP.
  static constexpr int kValueSteps = Traits::kVRegisterColumns / 16;
  static constexpr bool kVInRegisters = kValueSteps > 0;
  using Values = uint32_t[kVInRegisters ? kValueSteps : 1][ScoreGrid::kPieces][4];

  /// Work tiles differ in length, so each is claimed when the one before is done.
  __device__ __forceinline__ uint32_t claim() const {
    delay<Role::kWarp>();
    __syncthreads();  // All have read the one before, and what its tiles were.
    if (threadIdx.x == 0) shared_.work_tile = atomicAdd(p_.schedule.next, 1u);
    __syncthreads();
    return ptx::uniform(shared_.work_tile);
  }

  __device__ __forceinline__ void run_work_tile(const cuda::WorkTilePlace& place) {
    batch_ = place.batch, head_group_ = place.head, stage_ = 0;
    const VisibleExtent extent{p_.extents.rows(batch_, p_.seqlen_q), p_.extents.keys(batch_, p_.seqlen_k)};
    if (threadIdx.x == 0) shared_.row_end = extent.rows;  // Read behind a barrier.
    const uint32_t first_head = place.head * p_.query_heads_per_group;
    key_tile_ = key_tile(place.rank, first_head);
    if (key_tile_ * Traits::kKeys >= p_.seqlen_k) return;  // The last key block may have fewer.
    LiveRowTiles<Traits> row_tiles(p_, batch_, first_head + p_.query_heads_per_group, key_tile_);
    Dk dk = {};
    Dv dv = {};
    RowTile tile{first_head, -1, false};
    if (row_tiles.next(tile)) run_row_tiles(row_tiles, tile, extent, dk, dv);
    store(dk, dv);
  }

  __device__ __forceinline__ int32_t key_tile(uint32_t rank, uint32_t first_head) const {
    constexpr int kOfBlock = Traits::kTilesOfBlock;
    if (p_.dense.is_set) return static_cast<int32_t>(rank);  // It has no plan, and all tiles the same work.
    const int64_t mask = cuda::mask_index(p_.plan, batch_, first_head);
    const int32_t block = __ldg(p_.plan.key_order + mask * p_.key_blocks + rank / kOfBlock);
    return block * kOfBlock + static_cast<int32_t>(rank % kOfBlock);
  }

  __device__ __forceinline__ void run_row_tiles(LiveRowTiles<Traits>& row_tiles, RowTile tile,
                                                const VisibleExtent& extent, Dk& dk, Dv& dv) {
    load_keys<KTile>(p_.k, 0, extent.keys, shared_.k);
    load_keys<SharedVTile>(p_.v, Traits::kVRegisterColumns, extent.keys, shared_.v);
    Values values;
    if constexpr (kVInRegisters) read_values(extent.keys, values);
    load_q(tile, extent.rows, 0);
    load_dout(tile, extent.rows, 0);
    ptx::cp_async_commit();
    for (bool more = true; more; stage_ = Traits::kQBuffers == 2 ? stage_ ^ 1 : 0)
      more = run_row_tile(row_tiles, tile, values, dk, dv);
    delay<Role::kWarp>();
    __syncthreads();  // All have finished with the last one.
  }

  /// Leaves the next row tile in `tile`; false if there is none. It is found and requested under the products: a warp
  /// that waits for the plan's bits has no others beside it at a barrier.
  __device__ __forceinline__ bool run_row_tile(LiveRowTiles<Traits>& row_tiles, RowTile& tile, const Values& values,
                                               Dk& dk, Dv& dv) {
    wait_for_loads();
    count(tile);
    score(tile, values);
    delay<Role::kWarp>();
    __syncthreads();  // P and dS are there.
    add_dv(dv);
    RowTile next = tile;
    const bool more = row_tiles.next(next);
    if constexpr (Traits::kQBuffers == 2) {
      if (more) {
        load_q(next, shared_.row_end, stage_ ^ 1);
        if constexpr (Traits::kDoutBuffers == 2) load_dout(next, shared_.row_end, stage_ ^ 1);
        ptx::cp_async_commit();
      }
    }
    add_dk(dk);
    if constexpr (Traits::kDoutBuffers == 1) {
      delay<Role::kWarp>();
      __syncthreads();  // All have finished reading Q and dO.
      if (more) {
        if constexpr (Traits::kQBuffers == 1) load_q(next, shared_.row_end, 0);
        load_dout(next, shared_.row_end, 0);
        ptx::cp_async_commit();
      }
    }
    delay<Role::kWarp>();
    add_dq(tile);
    tile = next;
    return more;
  }

  /// Waits until all threads' loads have arrived and every warp has come here.
  __device__ __forceinline__ static void wait_for_loads() {
    ptx::cp_async_wait<0>();
    delay<Role::kWarp>();
    __syncthreads();
  }

  __device__ __forceinline__ void count(const RowTile& tile) const {
    if (p_.executed && threadIdx.x == 0 && key_tile_ % Traits::kTilesOfBlock == 0 &&
        tile.index % Traits::kTilesOfGranule == 0)
      atomicAdd(p_.executed, 1ull);
  }

  /// Columns from `first_column` on of the keys before `end`.
  template <typename Tile>
  __device__ __forceinline__ void load_keys(const cuda::TensorRows& from, int first_column, int32_t end,
                                            unsigned char* to) const {
    const int32_t first = key_tile_ * Traits::kKeys;
    const Element* rows =
        from.template of_head<const Element>(batch_, head_group_ / p_.splits) + first * from.row_stride;
    TileLoader<Tile, kThreads>().load(ptx::shared_address(to), rows + first_column, from.row_stride, end - first,
                                      from.columns - first_column);
  }
  template <typename Tile>
  __device__ __forceinline__ void load_rows(const cuda::TensorRows& from, const RowTile& tile, int32_t end,
                                            unsigned char* to) const {
    const int32_t first = tile.index * Traits::kRows;
    const Element* rows = from.template of_head<const Element>(batch_, tile.head) + first * from.row_stride;
    TileLoader<Tile, kThreads>().load(ptx::shared_address(to), rows, from.row_stride, end - first, from.columns);
  }
  __device__ __forceinline__ void load_q(const RowTile& tile, int32_t end, int buffer) const {
    load_rows<QTile>(p_.q, tile, end, shared_.q[buffer]);
    constexpr int kOfThread = 16 / sizeof(RowTerms);
    if (threadIdx.x >= Traits::kRows / kOfThread) return;
    const RowTerms* terms = p_.terms + index_of(tile) * Traits::kRows + threadIdx.x * kOfThread;
    ptx::cp_async_16(ptx::shared_address(shared_.terms[buffer] + threadIdx.x * kOfThread), terms, true);
  }
  __device__ __forceinline__ void load_dout(const RowTile& tile, int32_t end, int buffer) const {
    load_rows<DoutTile>(p_.dout, tile, end, shared_.dout[buffer]);
  }
  /// The index in [batch, heads_q, row_tiles].
  __device__ __forceinline__ int64_t index_of(const RowTile& tile) const {
    return (static_cast<int64_t>(batch_) * p_.heads_q + tile.head) * p_.row_tiles + tile.index;
  }

  /// Reads V's first columns through the buffers of Q and dO, before Q and dO need them.
  __device__ __forceinline__ void read_values(int32_t key_end, Values& values) const {
    using Tile = SharedTile<Element, Traits::kKeys, Traits::kVRegisterColumns>;
    static_assert(offsetof(Shared, p) - offsetof(Shared, q) >= Tile::kBytes);
    load_keys<Tile>(p_.v, 0, key_end, shared_.q[0]);
    ptx::cp_async_commit();
    wait_for_loads();
    const RowsOfB<Tile> v(ptx::shared_address(shared_.q) + warp_key() * Tile::kRowBytes);
#pragma unroll
    for (int step = 0; step < kValueSteps; ++step) {
#pragma unroll
      for (int piece = 0; piece < ScoreGrid::kPieces; ++piece) v.read(16 * piece, step, values[step][piece]);
    }
    delay<Role::kWarp>();
    __syncthreads();  // All have read them.
  }

  /// The first of the warp's rows and keys of the tile, of S and dP.
  __device__ __forceinline__ int warp_row() const { return ScoreGrid(warp_).row * ScoreGrid::kSlabs * 16; }
  __device__ __forceinline__ int warp_key() const { return ScoreGrid(warp_).column * ScoreGrid::kPieces * 16; }

  /// P and dS of the warp's rows and keys, which go to shared memory.
  __device__ __forceinline__ void score(const RowTile& tile, const Values& values) const {
    Mask mask;
    if (tile.partial)
      mask.template compute<Traits::kKeys>(p_, batch_, tile.head, tile.index * Traits::kRows + warp_row(),
                                           key_tile_ * Traits::kKeys, warp_key());
    const auto dropped = draw_dropped(tile);
    Scores s = {}, dp = {};
    const RowsOfA<QTile> q(ptx::shared_address(shared_.q[stage_]) + warp_row() * QTile::kRowBytes);
    const RowsOfB<KTile> k(ptx::shared_address(shared_.k) + warp_key() * KTile::kRowBytes);
    multiply_steps<Element, Traits::kQkDim / 16>(
        s, [&](int slab, int step, uint32_t (&a)[4]) { q.read(16 * slab, step, a); },
        [&](int piece, int step, uint32_t (&b)[4]) { k.read(16 * piece, step, b); });
    const RowsOfA<DoutTile> dout(ptx::shared_address(shared_.dout[dout_stage()]) + warp_row() * DoutTile::kRowBytes);
    const RowsOfB<SharedVTile> v(ptx::shared_address(shared_.v) + warp_key() * SharedVTile::kRowBytes);
    multiply_steps<Element, Traits::kVDim / 16>(
        dp, [&](int slab, int step, uint32_t (&a)[4]) { dout.read(16 * slab, step, a); },
        [&](int piece, int step, uint32_t (&b)[4]) {
          if (step >= kValueSteps) return v.read(16 * piece, step - kValueSteps, b);
#pragma unroll
          for (int i = 0; i < 4; ++i) b[i] = values[step][piece][i];
        });
    convert_products(tile, dropped, s, dp);
    if (tile.partial) mask.hide(s);
    write_scores(dropped, s, dp);
  }

  __device__ __forceinline__ int dout_stage() const { return Traits::kDoutBuffers == 2 ? stage_ : 0; }

  /// Which weights are dropped, a set of bits for each slab.
  using Dropped = std::conditional_t<Traits::Weights::kMayDrop, cuda::DroppedBits[ScoreGrid::kSlabs],
                                     cuda::NoneDropped[ScoreGrid::kSlabs]>;
  struct AllDropped {
    Dropped of_slab;
  };
  __device__ __forceinline__ AllDropped draw_dropped(const RowTile& tile) const {
    AllDropped dropped{};
    if constexpr (Traits::Weights::kMayDrop) {
      if (!weights_.drops()) return dropped;
      // A draw is of 32 keys or more.
      constexpr int kKeys = ScoreGrid::kPieces == 1 ? 32 : 16 * ScoreGrid::kPieces;
      const int key = warp_key() / kKeys * kKeys, shift = (warp_key() - key) / 4;
#pragma unroll
      for (int slab = 0; slab < ScoreGrid::kSlabs; ++slab) {
        cuda::DroppedBits& bits = dropped.of_slab[slab];
        bits = weights_.template draw<kKeys>(batch_, tile.head, tile.index * Traits::kRows + warp_row() + 16 * slab,
                                             key_tile_ * Traits::kKeys + key);
        bits.row[0] >>= shift;
        bits.row[1] >>= shift;
      }
    }
    return dropped;
  }
  template <int kValues>
  __device__ __forceinline__ void leave_out(const AllDropped& dropped, int slab, float (&x)[kValues]) const {
    if constexpr (Traits::Weights::kMayDrop) {
      if (!weights_.drops()) return;
#pragma unroll
      for (int n = 0; n < kValues; ++n)
        ptx::zero_if(dropped.of_slab[slab].row[n / 2 % 2] & 1u << (n / 4 * 2 + n % 2), x[n]);
    }
  }
  __device__ __forceinline__ float kept_weight_scale() const {
    if constexpr (Traits::Weights::kMayDrop) {
      return weights_.scale();
    } else {
      return 1;
    }
  }

  /// Makes exponents of P of S, and the gradients of P of dP, with the rows' terms.
  __device__ __forceinline__ void convert_products(const RowTile& tile, const AllDropped& dropped, Scores& s,
                                                   Scores& dp) const {
    const RowTerms* rows = shared_.terms[stage_] + warp_row() + cuda::Slab::row_in_eight();
    const typename Traits::Score score(p_, batch_, tile.head);
#pragma unroll
    for (int slab = 0; slab < ScoreGrid::kSlabs; ++slab) {
      const RowTerms terms[2] = {rows[16 * slab], rows[16 * slab + 8]};
      leave_out(dropped, slab, dp[slab]);
#pragma unroll
      for (int n = 0; n < 8 * ScoreGrid::kPieces; ++n)
        dp[slab][n] = __fmaf_rn(dp[slab][n], kept_weight_scale(), terms[n / 2 % 2].minus_delta);
      if constexpr (!Traits::Score::kFoldsLse) {
        const auto places = [&] {
          return cuda::Places<cuda::SlabSteps>{
              {tile.index * Traits::kRows + warp_row() + 16 * slab + cuda::Slab::row(0),
               key_tile_ * Traits::kKeys + warp_key() + cuda::Slab::column(0)}};
        };
        if (score.form == cuda::ScoreForm::kShifted) {
          score.shift(s[slab], places);
        } else if (score.form == cuda::ScoreForm::kOther) {
          score.differentiate(s[slab], dp[slab], places);
        }
      }
#pragma unroll
      for (int n = 0; n < 8 * ScoreGrid::kPieces; ++n)
        s[slab][n] = __fmaf_rn(s[slab][n], p_.scale_log2, terms[n / 2 % 2].minus_lse);
    }
  }

  __device__ __forceinline__ void write_scores(const AllDropped& dropped, Scores& s, const Scores& dp) const {
    constexpr int kStepsOfBlock = ScoreTile::kStepsOfBlock;
    const int first_step = warp_key() / 16;
    const auto place = first_step / kStepsOfBlock * ScoreTile::kBlockBytes + warp_row() * ScoreTile::kRowBytes;
    const PieceWriter<ScoreTile> p(shared_.p + place, first_step % kStepsOfBlock),
        ds(shared_.ds + place, first_step % kStepsOfBlock);
#pragma unroll
    for (int slab = 0; slab < ScoreGrid::kSlabs; ++slab) {
      uint32_t words[ScoreGrid::kPieces][4];
#pragma unroll
      for (float& score : s[slab]) score = ptx::exp2_approx(score);
#pragma unroll
      for (int i = 0; i < 4 * ScoreGrid::kPieces; ++i)
        words[i / 4][i % 4] =
            ptx::pack<Element>(s[slab][2 * i] * dp[slab][2 * i], s[slab][2 * i + 1] * dp[slab][2 * i + 1]);
#pragma unroll
      for (int piece = 0; piece < ScoreGrid::kPieces; ++piece) ds.write(16 * slab, piece, words[piece]);
      leave_out(dropped, slab, s[slab]);
#pragma unroll
      for (int i = 0; i < 4 * ScoreGrid::kPieces; ++i)
        words[i / 4][i % 4] = ptx::pack<Element>(s[slab][2 * i], s[slab][2 * i + 1]);
#pragma unroll
      for (int piece = 0; piece < ScoreGrid::kPieces; ++piece) p.write(16 * slab, piece, words[piece]);
    }
  }

  /// dV += P^T dO.
  __device__ __forceinline__ void add_dv(Dv& dv) const {
    add_gradients<typename Traits::DvGrid, DoutTile>(shared_.p, shared_.dout[dout_stage()], dv);
  }
  /// dK += dS^T Q.
  __device__ __forceinline__ void add_dk(Dk& dk) const {
    add_gradients<typename Traits::DkGrid, QTile>(shared_.ds, shared_.q[stage_], dk);
  }
  template <typename Grid, typename Tile>
  __device__ __forceinline__ void add_gradients(const unsigned char* scores, const unsigned char* rows,
                                                typename Grid::Fragments& gradients) const {
    const Grid grid(warp_);
    static_assert(ScoreTile::kStepsOfBlock % Grid::kRowWarps == 0 && Tile::kStepsOfBlock % Grid::kColumnWarps == 0);
    const ColumnsOfA<ScoreTile> a(ptx::shared_address(scores), grid.row);
    const ColumnsOfB<Tile> b(ptx::shared_address(rows), grid.column);
    multiply_steps<Element, Traits::kRows / 16>(
        gradients, [&](int slab, int step, uint32_t (&x)[4]) { a.read(16 * step, slab * Grid::kRowWarps, x); },
        [&](int piece, int step, uint32_t (&x)[4]) { b.read(16 * step, piece * Grid::kColumnWarps, x); });
  }

  /// Adds dQ = dS K to its sums.
  __device__ __forceinline__ void add_dq(const RowTile& tile) const {
    using Grid = typename Traits::DqGrid;
    using Fragments = DqFragments<Traits>;
    static_assert(KTile::kStepsOfBlock % Grid::kColumnWarps == 0);
    const Grid grid(warp_);
    const RowsOfA<ScoreTile> a(ptx::shared_address(shared_.ds) + 16 * grid.row * ScoreTile::kRowBytes);
    const ColumnsOfB<KTile> b(ptx::shared_address(shared_.k), grid.column);
    // Two halves of the columns, one after the other, take fewer registers.
    constexpr int kParts = kVInRegisters ? 2 : 1, kPieces = Grid::kPieces / kParts;
#pragma unroll 1
    for (int part = 0; part < kParts; ++part) {
      // The scales arrive under the product.
      float2 scales[Grid::kSlabs] = {};
      if (p_.dq.fixed_point) read_scales(tile, scales);
      float dq[Grid::kSlabs][8 * kPieces] = {};
      multiply_steps<Element, Traits::kKeys / 16>(
          dq, [&](int slab, int step, uint32_t (&x)[4]) { a.read(16 * Grid::kRowWarps * slab, step, x); },
          [&](int piece, int step, uint32_t (&x)[4]) {
            b.read(16 * step, (part * kPieces + piece) * Grid::kColumnWarps, x);
          });
      float* const sums = p_.dq.sums + Fragments::first(index_of(tile), warp_, ptx::reload_lane()) +
                          part * kPieces * Fragments::kOfPiece;
      if (p_.dq.fixed_point) {
        add_in_fixed_point(tile, dq, scales, reinterpret_cast<int32_t*>(sums));
      } else {
        add_fragments(dq, sums);
      }
    }
  }
  template <int kSlabs>
  __device__ __forceinline__ void read_scales(const RowTile& tile, float2 (&scales)[kSlabs]) const {
    const RowScales<Traits> rows(p_.dq, index_of(tile), warp_);
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) scales[slab] = rows.of_slab(slab);
  }
  template <int kSlabs, int kValues>
  __device__ __forceinline__ void add_in_fixed_point(const RowTile& tile, float (&dq)[kSlabs][kValues],
                                                     const float2 (&scales)[kSlabs], int32_t* sums) const {
    const RowScales<Traits> rows(p_.dq, index_of(tile), warp_);
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab)
      cuda::make_integers(
          dq[slab], [&](int row) { return row == 0 ? scales[slab].x : scales[slab].y; },
          [&](int row) { rows.mark(slab, row); });
    add_fragments(dq, sums);
  }
  /// Adds `dq` to sums in floats, or to sums in integers, whose bits `dq` then holds.
  template <int kSlabs, int kValues, typename Sum>
  __device__ __forceinline__ void add_fragments(const float (&dq)[kSlabs][kValues], Sum* sums) const {
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
#pragma unroll
      for (int n = 0; n < kValues; ++n) {
        Sum* const sum = sums + slab * DqFragments<Traits>::kOfSlab + n * 32;
        if constexpr (std::is_same_v<Sum, float>) {
          atomicAdd(sum, dq[slab][n]);
        } else {
          atomicAdd(sum, __float_as_int(dq[slab][n]));
        }
      }
    }
  }

  __device__ __forceinline__ void store(const Dk& dk, const Dv& dv) {
    if (p_.float_keys) {
      store_floats<typename Traits::DkGrid>(dk, p_.scale, p_.dk);
      store_floats<typename Traits::DvGrid>(dv, kept_weight_scale(), p_.dv);
    } else {
      store_elements(dk, dv);
    }
  }
  /// Stores fp32 gradients from registers.
  template <typename Grid>
  __device__ __forceinline__ void store_floats(const typename Grid::Fragments& gradients, float factor,
                                               const cuda::TensorRows& to) const {
    store_fragments<Grid>(gradients, factor, first_row<float>(to), to.row_stride, remaining_rows(), to.columns, warp_);
  }
  /// Stores gradients of the tensors' type through the buffers of K and V, or, if V has none, in turn through K's.
  __device__ __forceinline__ void store_elements(const Dk& dk, const Dv& dv) {
    unsigned char* const v = kVInRegisters ? shared_.k : shared_.v;
    static_assert(!kVInRegisters || VTile::kBytes <= KTile::kBytes);
    write_gradients<typename Traits::DkGrid, KTile>(dk, p_.scale, shared_.k);
    if constexpr (kVInRegisters) {
      __syncthreads();
      store_gradients<KTile>(shared_.k, p_.dk);
      __syncthreads();
    }
    write_gradients<typename Traits::DvGrid, VTile>(dv, kept_weight_scale(), v);
    __syncthreads();
    if constexpr (!kVInRegisters) store_gradients<KTile>(shared_.k, p_.dk);
    store_gradients<VTile>(v, p_.dv);
  }
  template <typename Grid, typename Tile>
  __device__ __forceinline__ void write_gradients(const typename Grid::Fragments& gradients, float factor,
                                                  unsigned char* to) const {
    write_fragments<Grid, Tile>(gradients, factor, to, warp_);
  }
  template <typename Tile>
  __device__ __forceinline__ void store_gradients(const unsigned char* from, const cuda::TensorRows& to) const {
    store_tile<Tile, kThreads>(from, first_row<Element>(to), to.row_stride, remaining_rows(), to.columns);
  }
  /// The key tile's first row in dk or dv, and the number of rows from there on.
  template <typename T>
  __device__ __forceinline__ T* first_row(const cuda::TensorRows& to) const {
    return to.template of_head<T>(batch_, head_group_) + key_tile_ * Traits::kKeys * to.row_stride;
  }
  __device__ __forceinline__ int32_t remaining_rows() const { return p_.seqlen_k - key_tile_ * Traits::kKeys; }

  const Params& p_;
  Shared& shared_;
  const int warp_;
  [[no_unique_address]] const typename Traits::Weights weights_;
  // The current work tile.
  uint32_t batch_ = 0, head_group_ = 0;
  int32_t key_tile_ = 0;
  int stage_ = 0;  ///< the buffer of the current row tile
};

}  // namespace flashmask::sm80::bwd
