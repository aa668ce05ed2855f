//! Owns the random numbers of a choice, and its exponential and logarithm. Each is specified to the bit.

/// Philox4x32 with 10 rounds: four random words per counter and key.
///
/// J. K. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; the constants are Random123's.
pub fn philox4x32_10(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let [mut c0, mut c1, mut c2, mut c3] = counter;
    let [mut k0, mut k1] = key;
    for _ in 0..10 {
        let p0 = 0xD251_1F53 * u64::from(c0);
        let p1 = 0xCD9E_8D57 * u64::from(c2);
        (c0, c1, c2, c3) = ((p1 >> 32) as u32 ^ c1 ^ k0, p1 as u32, (p0 >> 32) as u32 ^ c3 ^ k1, p0 as u32);
        k0 = k0.wrapping_add(0x9E37_79B9);
        k1 = k1.wrapping_add(0xBB67_AE85);
    }
    [c0, c1, c2, c3]
}

/// Standard exponential variate of a random word: `-ln(1 - v)` for the uniform `v = (x + 1/2) / 2^32`, above 0 always.
///
/// The form matters because the arg-max picks the *smallest* of many exponentials, about 1 / vocab. `-ln(u)` of a
/// 24-bit `u` near 1 has steps of 6e-8 there and would starve improbable ids; here the steps are 2^-32 and the relative
/// error stays below 2^-21.8 (measured over all words).
///
/// ```text
/// x <  2^31: v = (f32(x) + 0.5) * 2^-32;  w = 1 - v;  w == 1 ? v : -ln_f32(w) * (v / (1 - w))
/// x >= 2^31: -ln_f32((f32(!x) + 0.5) * 2^-32)
/// ```
/// `f32(x)` rounds to nearest even. The quotient undoes the rounding of `w` (W. Kahan's log1p); `1 - w` is exact.
pub fn exponential(x: u32) -> f32 {
    const TWO_POW_MINUS_32: f32 = 1.0 / 4_294_967_296.0;
    if x < 1 << 31 {
        let v = (x as f32 + 0.5) * TWO_POW_MINUS_32;
        let w = 1.0 - v;
        if w == 1.0 { v } else { -ln_f32(w) * (v / (1.0 - w)) }
    } else {
        -ln_f32((!x as f32 + 0.5) * TWO_POW_MINUS_32)
    }
}

/// Standard Gumbel variate of a random word, from -3.13 to 22.88; error at most 2^-19.9 (measured over all words).
pub fn gumbel(x: u32) -> f32 {
    -ln_f32(exponential(x))
}

/// Natural logarithm of a positive normal number, by a fixed sequence of fp32 operations.
///
/// Error at most 0.85 ulp and 2^-23.5 of the value (measured over every positive normal number). Scheme and
/// coefficients: S. Moshier's Cephes, `logf`; the decimals below name each fp32 coefficient exactly.
///
/// ```text
/// x = m * 2^e, sqrt(1/2) <= m < sqrt(2);  f = m - 1 (exact);  z = f * f
/// p = Horner(P0..P8, f);  y = (f * z) * p;  y = y + e * Q1;  y = y - z * 0.5;  r = f + y;  r = r + e * Q2
/// ```
/// Each `a * b + c` is two rounded operations.
pub fn ln_f32(x: f32) -> f32 {
    debug_assert!(x >= f32::MIN_POSITIVE && x.is_finite());
    const P: [f32; 9] = [
        0.070376836,
        -0.1151461,
        0.116769984,
        -0.12420141,
        0.14249323,
        -0.16668057,
        0.20000714,
        -0.24999994,
        0.3333333,
    ];
    // ln 2 in two parts; the larger has few bits, so that its product with the exponent is exact.
    const Q1: f32 = -0.00021219444;
    const Q2: f32 = 0.6933594;
    // Subtracting the bits of sqrt(1/2) lets the exponent field count from there.
    const SQRT_HALF_BITS: u32 = 0x3F35_04F3;
    let shifted = x.to_bits().wrapping_sub(SQRT_HALF_BITS);
    let e = (shifted as i32 >> 23) as f32;
    let m = f32::from_bits((shifted & 0x007F_FFFF) + SQRT_HALF_BITS);
    let f = m - 1.0;
    let z = f * f;
    let mut p = P[0];
    for c in &P[1..] {
        p = p * f + c;
    }
    let mut y = (f * z) * p;
    y += e * Q1;
    y -= z * 0.5;
    let r = f + y;
    r + e * Q2
}

/// `e^d` for `d <= 0`, by a fixed sequence of fp32 operations; 0 below -30, where no weight is left.
///
/// Error at most 0.99 ulp (measured over every argument). Scheme and coefficients: S. Moshier's Cephes, `expf`:
///
/// ```text
/// n = floor(d * log2(e) + 0.5);  r = d - n * Q2;  r = r - n * Q1;  z = r * r
/// p = Horner(P0..P5, r);  y = p * z;  y = y + r;  y = y + 1;  y * 2^n
/// ```
pub fn exp_f32(d: f32) -> f32 {
    const P: [f32; 6] = [0.00019875691, 0.0013981999, 0.008333452, 0.041665796, 0.16666666, 0.5];
    const Q1: f32 = -0.00021219444;
    const Q2: f32 = 0.6933594;
    // Also the case of -inf.
    if d < -30.0 {
        return 0.0;
    }
    let n = (d * std::f32::consts::LOG2_E + 0.5).floor();
    let mut r = d - n * Q2;
    r -= n * Q1;
    let z = r * r;
    let mut p = P[0];
    for c in &P[1..] {
        p = p * r + c;
    }
    let mut y = p * z;
    y += r;
    y += 1.0;
    // n is in -43..=0, so the power of two is a normal number and the product exact.
    y * f32::from_bits(((n as i32 + 127) as u32) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_gives_the_known_answers_of_random123() {
        assert_eq!(philox4x32_10([0; 4], [0; 2]), [0x6627_E8D5, 0xE169_C58D, 0xBC57_AC4C, 0x9B00_DBD8]);
        assert_eq!(philox4x32_10([u32::MAX; 4], [u32::MAX; 2]), [0x408F_276D, 0x41C8_3B0E, 0xA20B_C7C6, 0x6D54_51FD]);
        assert_eq!(
            philox4x32_10([0x243F_6A88, 0x85A3_08D3, 0x1319_8A2E, 0x0370_7344], [0xA409_3822, 0x299F_31D0]),
            [0xD16C_FE09, 0x94FD_CCEB, 0x5001_E420, 0x2412_6EA1]
        );
    }

    /// The bits come from an independent implementation of the module's head in numpy float32.
    #[test]
    fn noise_has_the_specified_bits() {
        for (x, exponential_bits, gumbel_bits) in [
            (0x0000_0000, 0x2F00_0000, 0x41B6_FDA9),
            (0x0000_0001, 0x2FC0_0000, 0x41AE_33B3),
            (0x0000_0002, 0x3020_0000, 0x41AA_1D88),
            (0x0000_007F, 0x32FF_0000, 0x418A_A927),
            (0x010D_8015, 0x3B87_0728, 0x40AF_BC38),
            (0x3FFF_FFFF, 0x3E93_4B10, 0x3F9F_79A2),
            (0x7FFF_FFFF, 0x3F31_7218, 0x3EBB_A795),
            (0x8000_0000, 0x3F31_7218, 0x3EBB_A795),
            (0xA1FD_2BCF, 0x3F80_39D7, 0xBAE7_27CA),
            (0xC0FF_EE00, 0x3FB3_75FE, 0xBEAD_04C9),
            (0xFFFF_FF7F, 0x418A_9927, 0xC036_896E),
            (0xFFFF_FFFE, 0x41AE_33B3, 0xC045_2B66),
            (0xFFFF_FFFF, 0x41B6_FDA9, 0xC048_51D5),
        ] {
            assert_eq!(exponential(x).to_bits(), exponential_bits, "exponential of {x:#010x}");
            assert_eq!(gumbel(x).to_bits(), gumbel_bits, "gumbel of {x:#010x}");
        }
        for (x, bits) in [
            (1e-30, 0xC28A_27B5),
            (0.1, 0xC013_5D8E),
            (f32::from_bits(0x3F35_04F3), 0xBEB1_7218),
            (f32::from_bits(0x3F35_04F4), 0xBEB1_7216),
            (1.0, 0),
            (1.1, 0x3DC3_31FF),
            (1e10, 0x41B8_34F1),
        ] {
            assert_eq!(ln_f32(x).to_bits(), bits, "ln of {x}");
        }
        for (d, bits) in [
            (-0.0, 0x3F80_0000),
            (-1e-3, 0x3F7F_BE7F),
            (-0.5, 0x3F1B_4598),
            (-7.25, 0x3A3A_2AFF),
            (-30.0, 0x29D2_B706),
            (-31.0, 0),
            (f32::NEG_INFINITY, 0),
        ] {
            assert_eq!(exp_f32(d).to_bits(), bits, "exp of {d}");
        }
    }

    #[test]
    fn ln_and_exp_stay_within_their_documented_error() {
        let ulps = |got: f32, want: f64| {
            let bits = (want as f32).abs().to_bits();
            let ulp = f64::from(f32::from_bits(bits + 1)) - f64::from(f32::from_bits(bits));
            (f64::from(got) - want).abs() / ulp
        };
        // A prime stride visits every exponent and all residues of the mantissa.
        for bits in (f32::MIN_POSITIVE.to_bits()..f32::INFINITY.to_bits()).step_by(2011) {
            let x = f32::from_bits(bits);
            assert!(ulps(ln_f32(x), f64::from(x).ln()) <= 0.85, "ln of {x:e}");
        }
        for bits in ((-0.0f32).to_bits()..=(-30.0f32).to_bits()).step_by(1009) {
            let d = f32::from_bits(bits);
            assert!(ulps(exp_f32(d), f64::from(d).exp()) <= 0.99, "exp of {d:e}");
        }
        for x in (0..=u32::MAX).step_by(4099) {
            let want = -(-(f64::from(x) + 0.5) / 4_294_967_296.0).ln_1p();
            assert!(((f64::from(exponential(x)) - want) / want).abs() < 2f64.powf(-21.8), "exponential of {x:#x}");
            assert!((f64::from(gumbel(x)) + want.ln()).abs() < 2f64.powf(-19.9), "gumbel of {x:#x}");
        }
    }
}
