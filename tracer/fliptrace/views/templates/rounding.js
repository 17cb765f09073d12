// Rounding to 16-bit types and the boundaries between their values, as fliptrace.numerics has them. Values are doubles,
// which hold every FP32 and 16-bit value and every midpoint exactly.
flip.rounding = (() => {
  "use strict";
  const TYPES = {
    bfloat16: { fraction: 7, bias: 127, infinity: 0x7f80 },
    float16: { fraction: 10, bias: 15, infinity: 0x7c00 },
  };
  const view = new DataView(new ArrayBuffer(4));

  function floatOf(bits) {
    view.setUint32(0, bits);
    return view.getFloat32(0);
  }

  function evenOf(value) {
    const low = Math.floor(value);
    const rest = value - low;
    return rest > 0.5 || (rest === 0.5 && low % 2 === 1) ? low + 1 : low;
  }

  // The 16 bits of a value, rounded to nearest, ties to even.
  function round(value, type) {
    const { fraction, bias, infinity } = TYPES[type];
    if (Number.isNaN(value)) return infinity | (1 << (fraction - 1));
    const sign = value < 0 || Object.is(value, -0) ? 0x8000 : 0;
    const size = Math.abs(value);
    if (size === Infinity) return sign | infinity;
    let exponent = size > 0 ? Math.floor(Math.log2(size)) : -1e3;
    if (size > 0 && size < 2 ** exponent) exponent -= 1;
    if (size > 0 && size >= 2 ** (exponent + 1)) exponent += 1;
    exponent = Math.max(exponent, 1 - bias);
    const steps = evenOf(size / 2 ** (exponent - fraction));
    const bits = ((exponent + bias - 1) << fraction) + steps;
    return sign | Math.min(bits, infinity);
  }

  // A value by its place among all: neighbours are one apart, both zeros are 0. Infinity's place has the value that the
  // next number would have.
  const placeOf = (bits) => (bits & 0x8000 ? -(bits & 0x7fff) : bits & 0x7fff);

  function valueAt(place, type) {
    const { fraction, bias } = TYPES[type];
    const size = Math.abs(place);
    const exponent = Math.max(size >> fraction, 1);
    const steps = size - ((exponent - 1) << fraction);
    return Math.sign(place) * steps * 2 ** (exponent - bias - fraction);
  }

  function valueOf(bits, type) {
    const { infinity } = TYPES[type];
    const size = bits & 0x7fff;
    if (size > infinity) return NaN;
    if (size === infinity) return bits & 0x8000 ? -Infinity : Infinity;
    const value = valueAt(placeOf(bits), type);
    return bits & 0x8000 && value === 0 ? -0 : value;
  }

  function nearest(value, bits, type) {
    const largest = TYPES[type].infinity - 1;
    const place = Math.max(-largest, Math.min(largest, placeOf(bits)));
    const lower = (valueAt(place - 1, type) + valueAt(place, type)) / 2;
    const upper = (valueAt(place, type) + valueAt(place + 1, type)) / 2;
    const [twice, total] = [value * 2, lower + upper];
    return twice > total || (twice === total && Math.abs(upper) > Math.abs(lower)) ? upper : lower;
  }

  // Everything about two FP32 values given by their bits.
  function compare(reference, candidate, type) {
    const values = [floatOf(reference), floatOf(candidate)];
    // Counts both zeros: 1 lies between them.
    const order = (bits) => (bits >>> 31 ? -(bits & 0x7fffffff) - 1 : bits);
    const order16 = (bits) => (bits & 0x8000 ? -(bits & 0x7fff) - 1 : bits);
    const finite = values.every(Number.isFinite);
    const result = { values, bits: [reference, candidate], ulp: Math.abs(order(reference) - order(candidate)), type };
    if (!Object.hasOwn(TYPES, type)) {
      return { ...result, rounded: null, crossed: 0, boundary: null, distances: null, survives: true };
    }
    const rounded = values.map((value) => round(value, type));
    const places = rounded.map(placeOf);
    const nan = values.some(Number.isNaN);
    const crossed = nan ? 0 : Math.abs(order16(rounded[0]) - order16(rounded[1]));
    let boundary = null;
    if (crossed > 0 && places[0] === places[1]) boundary = null;
    else if (crossed > 0) {
      const largest = TYPES[type].infinity - 1;
      const up = Math.abs(values[0]) === Infinity || Math.abs(places[0]) > largest ? places[0] > 0 : places[1] > places[0];
      const within = Math.max(-largest, Math.min(largest, places[0]));
      boundary = (valueAt(within, type) + valueAt(within + (up ? 1 : -1), type)) / 2;
    } else if (finite) boundary = nearest(values[0], rounded[0], type);
    if (!finite || boundary === null) boundary = null;
    return {
      ...result,
      rounded,
      roundedValues: rounded.map((bits) => valueOf(bits, type)),
      crossed,
      boundary,
      distances: boundary === null ? null : values.map((value) => value - boundary),
      survives: nan ? reference !== candidate : rounded[0] !== rounded[1],
    };
  }

  const hex = (bits, digits) => `0x${(bits >>> 0).toString(16).padStart(digits, "0")}`;

  // The shortest text that gives these bits back: of a float32 that is fewer digits than its double has.
  function exact(value) {
    if (Object.is(value, -0)) return "-0.0";
    if (!Number.isFinite(value)) return Number.isNaN(value) ? "NaN" : `${value > 0 ? "" : "-"}infinity`;
    return String(value);
  }

  return { compare, round, valueOf, hex, exact };
})();
