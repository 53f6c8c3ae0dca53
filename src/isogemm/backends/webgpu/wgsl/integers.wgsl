// Float arithmetic by integers: the bits of IEEE 754, to nearest even, on a device whose own operations round otherwise.
struct Wide {
  hi: u32,
  lo: u32,
}

// x >> n; a lowest bit of 1 stands for all ones that were shifted out.
fn shifted(x: Wide, n: u32) -> Wide {
  if (n == 0u) {
    return x;
  }
  if (n >= 64u) {
    return Wide(0u, select(0u, 1u, (x.hi | x.lo) != 0u));
  }
  if (n >= 32u) {
    let s = n - 32u;
    var lost = x.lo;
    if (s > 0u) {
      lost |= x.hi << (32u - s);
    }
    return Wide(0u, (x.hi >> s) | select(0u, 1u, lost != 0u));
  }
  let lost = x.lo << (32u - n);
  return Wide(x.hi >> n, (x.lo >> n) | (x.hi << (32u - n)) | select(0u, 1u, lost != 0u));
}

// A positive finite number as (24-bit integer, exponent): integer * 2^exponent.
fn apart(magnitude: u32) -> vec2<i32> {
  if (magnitude < 0x00800000u) {
    let up = countLeadingZeros(magnitude) - 8u;
    return vec2<i32>(i32(magnitude << up), -149 - i32(up));
  }
  return vec2<i32>(i32((magnitude & 0x007fffffu) | 0x00800000u), i32(magnitude >> 23u) - 150);
}

// sum * 2^exponent with a sign, rounded once; sum is not 0 and below 2^63.
fn together(sum: Wide, exponent: i32, sign: u32) -> f32 {
  var lead = 63 - i32(countLeadingZeros(sum.hi));
  if (sum.hi == 0u) {
    lead = 31 - i32(countLeadingZeros(sum.lo));
  }
  let drop = max(lead - 23, -149 - exponent);
  var kept: u32;  // two bits more than the fraction, of which the last one stands for all below it
  if (drop >= 2) {
    kept = shifted(sum, u32(drop - 2)).lo;
  } else {
    kept = sum.lo << u32(2 - drop);
  }
  let rest = kept & 3u;
  var bits = kept >> 2u;
  bits += select(0u, 1u, rest == 3u || (rest == 2u && (bits & 1u) == 1u));
  if (drop == lead - 23) {
    let biased = lead + exponent + 127;
    if (biased >= 255) {
      return bitcast<f32>(sign | (0x7f800000u + p.zero));
    }
    bits += u32(biased - 1) << 23u;  // a carry out of the fraction is the next exponent
  }
  return bitcast<f32>(sign | bits);
}

// x * y + z with one rounding.
fn fused(x: f32, y: f32, z: f32) -> f32 {
  let bx = bitcast<u32>(x);
  let by = bitcast<u32>(y);
  let bz = bitcast<u32>(z);
  let ax = bx & 0x7fffffffu;
  let ay = by & 0x7fffffffu;
  let az = bz & 0x7fffffffu;
  let sp = (bx ^ by) & 0x80000000u;
  let sz = bz & 0x80000000u;
  let inf = 0x7f800000u;
  if (max(max(ax, ay), az) >= inf) {
    let endless = ax == inf || ay == inf;
    let nan = max(max(ax, ay), az) > inf || (endless && min(ax, ay) == 0u) || (endless && az == inf && sp != sz);
    let bits = select(select(bz, sp | inf, endless), 0x7fffffffu, nan);
    return bitcast<f32>(bits + p.zero);
  }
  if (min(ax, ay) == 0u) {
    return bitcast<f32>(select(bz, sp & sz, az == 0u));
  }
  let fx = apart(ax);
  let fy = apart(ay);
  // 24 x 24 bits, then 14 bits up: the product is in [2^60, 2^62).
  let x0 = u32(fx.x) & 0xffffu;
  let x1 = u32(fx.x) >> 16u;
  let y0 = u32(fy.x) & 0xffffu;
  let y1 = u32(fy.x) >> 16u;
  let middle = x0 * y1 + x1 * y0;
  let low = x0 * y0;
  let lo = low + (middle << 16u);
  let hi = x1 * y1 + (middle >> 16u) + select(0u, 1u, lo < low);
  var product = Wide((hi << 14u) | (lo >> 18u), lo << 14u);
  var exponent = fx.y + fy.y - 14;
  if (az == 0u) {
    return together(product, exponent, sp);
  }
  let fz = apart(az);
  var addend = Wide(u32(fz.x) << 5u, 0u);  // in [2^60, 2^61)
  let distance = exponent - (fz.y - 37);
  if (distance >= 0) {
    addend = shifted(addend, u32(distance));
  } else {
    product = shifted(product, u32(-distance));
    exponent = fz.y - 37;
  }
  if (sp == sz) {
    let sum = product.lo + addend.lo;
    return together(Wide(product.hi + addend.hi + select(0u, 1u, sum < addend.lo), sum), exponent, sp);
  }
  let swap = product.hi < addend.hi || (product.hi == addend.hi && product.lo < addend.lo);
  let large = Wide(select(product.hi, addend.hi, swap), select(product.lo, addend.lo, swap));
  let small = Wide(select(addend.hi, product.hi, swap), select(addend.lo, product.lo, swap));
  let rest = Wide(large.hi - small.hi - select(0u, 1u, large.lo < small.lo), large.lo - small.lo);
  if ((rest.hi | rest.lo) == 0u) {
    return bitcast<f32>(p.zero);
  }
  return together(rest, exponent, select(sp, sz, swap));
}

// x / y for positive finite numbers, rounded once.
fn divided(x: f32, y: f32) -> f32 {
  let fx = apart(bitcast<u32>(x));
  let fy = apart(bitcast<u32>(y));
  let divisor = u32(fy.x);
  var rest = u32(fx.x);
  var exponent = fx.y - fy.y - 26;
  if (rest < divisor) {
    rest <<= 1u;
    exponent -= 1;
  }
  var quotient = 0u;
  for (var step = 0u; step < 26u; step++) {
    let fits = rest >= divisor;
    quotient = (quotient << 1u) | select(0u, 1u, fits);
    rest = (rest - select(0u, divisor, fits)) << 1u;
  }
  return together(Wide(0u, (quotient << 1u) | select(0u, 1u, rest != 0u)), exponent, 0u);
}

// float16 to float32: exact.
fn widened(half: u32) -> f32 {
  let sign = (half & 0x8000u) << 16u;
  let rest = half & 0x7fffu;
  if (rest >= 0x7c00u) {
    return bitcast<f32>((sign | 0x7f800000u | ((rest & 0x3ffu) << 13u)) + p.zero);
  }
  if (rest < 0x400u) {
    if (rest == 0u) {
      return bitcast<f32>(sign);
    }
    let up = countLeadingZeros(rest) - 21u;
    return bitcast<f32>(sign | ((113u - up) << 23u) | (((rest << up) & 0x3ffu) << 13u));
  }
  return bitcast<f32>(sign | ((rest << 13u) + 0x38000000u));
}

// The nearest float16, to even; every NaN is 0x7fff.
fn narrowed(bits: u32) -> u32 {
  let sign = (bits >> 16u) & 0x8000u;
  let rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) {
    return 0x7fffu;
  }
  if (rest >= 0x477ff000u) {
    return sign | 0x7c00u;
  }
  if (rest >= 0x38800000u) {
    let scaled = rest - 0x38000000u;
    return sign | ((scaled + 0xfffu + ((scaled >> 13u) & 1u)) >> 13u);
  }
  let drop = 126u - (rest >> 23u);
  if (drop > 25u) {
    return sign;
  }
  let fraction = (rest & 0x007fffffu) | 0x00800000u;
  let kept = fraction >> drop;
  let lost = fraction & ((1u << drop) - 1u);
  let half = 1u << (drop - 1u);
  return sign | (kept + select(0u, 1u, lost > half || (lost == half && (kept & 1u) == 1u)));
}
