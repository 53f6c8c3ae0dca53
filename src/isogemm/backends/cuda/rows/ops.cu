// Operations along rows as passes: before pass P, `change` renews a row's elements v (and g, a second operand); `term` of
// them is folded over the row; `settle` turns the total into numbers s of the row; `result` follows the last pass.
//
// OP is one of the names below, as isogemm.contract.rows.OPERATIONS has them in small letters. Gradients: v is x, g is dy (times the weight, where there is one).

enum {
  RMS_NORM, LAYER_NORM, SOFTMAX, LOG_SOFTMAX, SUM, MEAN, ADD_RMS_NORM, CROSS_ENTROPY, CROSS_ENTROPY_BACK,
  RMS_NORM_BACK, LAYER_NORM_BACK, SOFTMAX_BACK, LOG_SOFTMAX_BACK,
};

// SINGLE: a row becomes numbers. GIVEN: what passes would find is given, and a number of each row in place of a second operand.
constexpr bool BACK = OP >= RMS_NORM_BACK && OP <= LOG_SOFTMAX_BACK, SINGLE = OP == SUM || OP == MEAN || OP == CROSS_ENTROPY;
constexpr bool GIVEN = OP == CROSS_ENTROPY_BACK, TARGETS = GIVEN || OP == CROSS_ENTROPY, TWO = TG != NONE && !GIVEN;
constexpr bool EXPS = OP == SOFTMAX || OP == LOG_SOFTMAX || OP == CROSS_ENTROPY || OP == SOFTMAX_BACK || OP == LOG_SOFTMAX_BACK;
constexpr int PASSES = GIVEN                   ? 0
                       : OP == LAYER_NORM_BACK ? 4
                       : OP == SOFTMAX_BACK || OP == LOG_SOFTMAX_BACK ? 3
                       : EXPS || OP == LAYER_NORM || OP == RMS_NORM_BACK        ? 2
                                                                      : 1;
enum Fold { ADDED, SQUARED, LARGEST };
template <int P> __device__ constexpr Fold fold() {
  if (EXPS) return P == 0 ? LARGEST : ADDED;
  if (OP == RMS_NORM || OP == ADD_RMS_NORM || (OP == LAYER_NORM && P == 1)) return SQUARED;
  return ADDED;
}

template <int P> DEVICE float step(float total, float t) { return fold<P>() == SQUARED ? fma_(t, t, total) : add(total, t); }

// What a second operand does before the first pass: it is weighted, or added to the first one.
DEVICE void both(float (&v)[4], float (&g)[4], const float (&w)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (BACK && TW != NONE) g[j] = mul(g[j], w[j]);
    if (OP == ADD_RMS_NORM) v[j] = rounded<TG>(add(v[j], g[j]));
  }
}

struct Columns {
  i64 x, g, w, b;
};

template <int P> DEVICE void change_one(float& v, const float* s) {
  if (((OP == LAYER_NORM || OP == LAYER_NORM_BACK || EXPS) && P == 1) || GIVEN) v = sub(v, s[0]);
  if ((OP == RMS_NORM_BACK && P == 1) || (OP == LAYER_NORM_BACK && P == 2)) v = mul(v, s[1]);
}
template <int P> DEVICE void change(float (&four)[4], const float* s) {
  if ((OP == SOFTMAX || OP == SOFTMAX_BACK || OP == LOG_SOFTMAX_BACK) && P == 2) divide(four, s[1], s[2]);
#pragma unroll
  for (int j = 0; j < 4; ++j) change_one<P>(four[j], s);
  if (EXPS && OP != LOG_SOFTMAX && P == 1) exps(four);
  if (GIVEN) exps_over(four, s[1], s[2]);
}
// All that was before pass LAST, at once.
template <int P, int LAST> DEVICE void changes(float (&v)[4], const float* s) {
  if constexpr (P == 1 && LAST > 1 && (OP == SOFTMAX || OP == SOFTMAX_BACK || OP == LOG_SOFTMAX_BACK)) {
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = sub(v[j], s[0]);
    exps_over(v, s[1], s[2]);
    if constexpr (P + 1 < LAST) changes<P + 2, LAST>(v, s);
  } else {
    change<P>(v, s);
    if constexpr (P < LAST) changes<P + 1, LAST>(v, s);
  }
}

template <int P> DEVICE float term(float v, float g) {
  if ((OP == RMS_NORM_BACK && P == 0) || (OP == LAYER_NORM_BACK && P == 1)) return mul(v, v);
  if ((OP == RMS_NORM_BACK && P == 1) || (OP == LAYER_NORM_BACK && P == 3)) return mul(g, v);
  if (OP == SOFTMAX_BACK && P == 2) return mul(v, g);
  if ((OP == LAYER_NORM_BACK || OP == LOG_SOFTMAX_BACK) && P == 2) return g;
  return v;
}
template <int P> DEVICE void terms_of(const float (&v)[4], const float (&g)[4], float (&t)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) t[j] = term<P>(v[j], g[j]);
  if (OP == LOG_SOFTMAX && P == 1) exps(t);
}

template <int P> DEVICE void settle(float total, float n, float eps, float* s) {
  if (EXPS) {
    if (P == 0) s[0] = total;
    if (P == 1) s[1] = OP == LOG_SOFTMAX ? log_(total) : total, s[2] = __frcp_rn(total);
    if (P == 2) s[3] = total;
    return;
  }
  if (OP == SUM) {
    s[0] = total;
    return;
  }
  const float mean = __fdiv_rn(total, n);
  constexpr bool root = OP == RMS_NORM || OP == ADD_RMS_NORM || (OP == RMS_NORM_BACK && P == 0) || ((OP == LAYER_NORM || OP == LAYER_NORM_BACK) && P == 1);
  if (root) s[1] = __frcp_rn(__fsqrt_rn(add(mean, eps)));
  else if (OP == MEAN || (OP != RMS_NORM_BACK && P == 0)) s[0] = mean;
  else s[OP == LAYER_NORM_BACK && P == 3 ? 3 : 2] = mean;
}

DEVICE float result(float v, float g, float w, float b, const float* s) {
  if (OP == RMS_NORM || OP == ADD_RMS_NORM || OP == LAYER_NORM) {
    v = mul(v, s[1]);
    if (TW != NONE) v = mul(v, w);
    return TB != NONE ? add(v, b) : v;
  }
  if (OP == SOFTMAX) return v;
  if (OP == LOG_SOFTMAX) return sub(v, s[1]);
  if (OP == RMS_NORM_BACK) return mul(sub(g, mul(v, s[2])), s[1]);
  if (OP == LAYER_NORM_BACK) return mul(sub(sub(g, s[2]), mul(v, s[3])), s[1]);
  if (GIVEN) return mul(v, s[3]);
  if (OP == SOFTMAX_BACK) return mul(v, sub(g, s[3]));
  return sub(g, mul(v, s[3]));
}
// Of four neighbours; `at` is where from the first of them the element lies that the row's class names.
DEVICE void results(const float (&v)[4], const float (&g)[4], const float (&w)[4], const float (&b)[4], const float* s, int at,
                    float (&y)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) y[j] = result(v[j], g[j], w[j], b[j], s);
  if (GIVEN && (u32)at < 4) {
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (j == at) y[j] = sub(y[j], s[3]);
  }
}

// The class of a row, in an operation that has one; -1 where it is `ignored`. Places of classes count words of four bytes.
DEVICE int class_of(const void* targets, const Place& place, u32 row, i64 ignored, int n) {
  if (!TARGETS) return -1;
  const i64 target = __ldg((const i64*)((const u32*)targets + place.at(2, row)));
  if (target == ignored) return -1;
  if (target < 0 || target >= n) __trap();  // an error of the device, as torch's own kernels have it
  return (int)target;
}
// What is given of a row: the largest, the sum of exponentials, its reciprocal, and dy.
DEVICE void take(const void* sums, const void* dy, const Place& place, u32 row, int target, float* s) {
  if (!GIVEN) return;
  const float2 found = __ldg((const float2*)sums + row);
  s[0] = found.x, s[1] = found.y, s[2] = __frcp_rn(found.y);
  s[3] = target < 0 ? 0.0f : value<TG>(dy, place.at(1, row));
}
// Where the numbers of a SINGLE operation go.
DEVICE void conclude(const void* x, i64 from, i64 x_c, int target, void* out, void* second, u32 row, const float* s) {
  if (!TARGETS) return put<TO>(out, row, s[0]);
  const float largest = add(s[0], 0.0f);  // of two zeros any may be found
  put<TO>(out, row, target < 0 ? 0.0f : sub(log_(s[1]), sub(value<TX>(x, from + target * x_c), largest)));
  ((float2*)second)[row] = make_float2(canonical(largest), canonical(s[1]));
}
