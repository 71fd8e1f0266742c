// Elementary functions on vectors, lane by lane: a lane's bits depend on its argument alone. The
// errors are bounds on those found against float64 on a fine grid, with and without fused
// multiply-adds.
#pragma once
#include "simd.h"

namespace hr {
namespace HR_LEVEL {

// e^x, relative error below 1e-7 on [-86.9, 88.7]; beyond it the value at the nearer end.
template <class V>
HR_INLINE V exp(V x) {
  x = min(max(x, fill<V>(-86.9f)), fill<V>(88.72f));
  const V n = round(x * fill<V>(1.44269504f));
  V r = fma(n, fill<V>(-0.693359375f), x);
  r = fma(n, fill<V>(2.12194440e-4f), r);
  V p = fma(fill<V>(1.3942164882e-03f), r, fill<V>(8.3637761427e-03f));
  p = fma(p, r, fill<V>(4.1666363407e-02f));
  p = fma(p, r, fill<V>(1.6666573361e-01f));
  p = fma(p, r, fill<V>(0.5f));
  p = fma(p, r * r, r) + fill<V>(1.0f);
  return times_power(p, n);
}

// 2^x for x <= 0, relative error below 1e-7 down to -125; exactly 0 from -127 (also -infinity) on.
HR_INLINE F exp2_negative(F x) {
  x = max(x, set(-127.0f));
  const F n = round(x);
  const F r = x - n;
  F p = fma(set(1.5469734582e-04f), r, set(1.3390866853e-03f));
  p = fma(p, r, set(9.6180307725e-03f));
  p = fma(p, r, set(5.5503571055e-02f));
  p = fma(p, r, set(2.4022651084e-01f));
  p = fma(p, r, set(6.9314718803e-01f));
  p = fma(p, r, set(1.0f));
  return times_power(p, n);
}

// Natural logarithm of normal positive x, relative error below 1e-7.
HR_INLINE F log(F x) {
  const I whole = as_int(x);
  // The exponent that leaves a mantissa in [sqrt(1/2), sqrt(2)).
  const I exponent = shift_right<23>(whole - iset(0x3f3504f3));
  const F m = as_float(whole - shift_left<23>(exponent)) - set(1.0f);
  const F n = to_float(exponent);
  F p = fma(set(7.3325293179e-02f), m, set(-1.1659929255e-01f));
  p = fma(p, m, set(1.1634662556e-01f));
  p = fma(p, m, set(-1.2396700444e-01f));
  p = fma(p, m, set(1.4251155626e-01f));
  p = fma(p, m, set(-1.6669151003e-01f));
  p = fma(p, m, set(2.0000688087e-01f));
  p = fma(p, m, set(-2.4999981186e-01f));
  p = fma(p, m, set(3.3333331257e-01f));
  const F square = m * m;
  p = fma(p, m * square, n * set(-2.12194440e-4f));
  p = fma(square, set(-0.5f), p);
  return fma(n, set(0.693359375f), m + p);
}

template <class V>
HR_INLINE V sigmoid(V x) { return fill<V>(1.0f) / (fill<V>(1.0f) + exp(fill<V>(0.0f) - x)); }

// tanh, relative error below 1.5e-7.
template <class V>
HR_INLINE V tanh(V x) {
  const V u = x * x;
  V p = fma(fill<V>(2.2989519577e-03f), u, fill<V>(-8.3500192511e-03f));
  p = fma(p, u, fill<V>(2.1771000075e-02f));
  p = fma(p, u, fill<V>(-5.3959551011e-02f));
  p = fma(p, u, fill<V>(1.3333304988e-01f));
  p = fma(p, u, fill<V>(-3.3333333183e-01f));
  const V small = fma(p * u, x, x);
  const V magnitude = abs(x);
  const V tail = fill<V>(2.0f) / (exp(magnitude + magnitude) + fill<V>(1.0f));
  const V large = fill<V>(1.0f) - tail;
  const V signed_large = select(x < fill<V>(0.0f), fill<V>(0.0f) - large, large);
  return select(magnitude < fill<V>(0.625f), small, signed_large);
}

// The distribution function of the normal law, (1 + erf(x / sqrt 2)) / 2, relative error below
// 2e-6, absolute below 2e-7: e^(-z^2) t P(t) with t = 1 / (1 + z / 2) for z = |x| / sqrt 2.
template <class V>
HR_INLINE V normal_cdf(V x) {
  const V z = abs(x) * fill<V>(0.70710678f);
  const V t = fill<V>(1.0f) / fma(z, fill<V>(0.5f), fill<V>(1.0f));
  V p = fma(fill<V>(3.5375779305e-02f), t, fill<V>(-1.8870808479e-01f));
  p = fma(p, t, fill<V>(3.7536248542e-01f));
  p = fma(p, t, fill<V>(-2.8050339593e-01f));
  p = fma(p, t, fill<V>(-3.0638741741e-02f));
  p = fma(p, t, fill<V>(4.0902590056e-02f));
  p = fma(p, t, fill<V>(5.2545342263e-02f));
  p = fma(p, t, fill<V>(1.8624813966e-01f));
  p = fma(p, t, fill<V>(2.4506392845e-01f));
  p = fma(p, t, fill<V>(2.8226393712e-01f));
  p = fma(p, t, fill<V>(2.8208802358e-01f));
  const V tail = exp(fill<V>(0.0f) - z * z) * t * p * fill<V>(0.5f);
  return select(x < fill<V>(0.0f), tail, fill<V>(1.0f) - tail);
}

}  // namespace HR_LEVEL
}  // namespace hr
