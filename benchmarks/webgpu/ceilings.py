"""What a device can do: a copy's bandwidth, by the API and by a kernel, and multiply-adds that touch no memory."""

from __future__ import annotations

import time

from .rounds import Bench, bound_launch

PEAK_STEPS = 4096
PEAK = """
@group(0) @binding(0) var<storage, read_write> out: array<vec4<f32>>;
@compute @workgroup_size(256) fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  let x = out[id.x];
  var s = array<vec4<f32>, 4>(x, x + 1.0, x + 2.0, x + 3.0);
  var s0 = s[0]; var s1 = s[1]; var s2 = s[2]; var s3 = s[3];
  for (var i = 0u; i < STEPSu / 8u; i++) {
    BODY
  }
  out[id.x] = s0 + s1 + s2 + s3;
}
""".replace("BODY", "".join(f"s{i} = fma(s{i}, x, x);" for i in (0, 1, 2, 3)) * 8)
COPY = """
@group(0) @binding(0) var<storage, read> x: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read_write> out: array<vec4<u32>>;
@compute @workgroup_size(256) fn main(
  @builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) n: vec3<u32>
) {
  for (var i = id.x; i < arrayLength(&x); i += n.x * 256u) { out[i] = x[i]; }
}
"""


def ceilings(bench: Bench, small: bool) -> None:
    """A copy's bandwidth, by the API and by a kernel, and multiply-adds that touch no memory."""
    adapter, size = bench.adapter, 2**22 if small else 2**28
    one, other = adapter.allocate(size), adapter.allocate(size)

    def api() -> float:
        calls, found = (2 if small else 32), []
        for _ in range(4):
            adapter.wait()
            begun = time.perf_counter()
            encoder = adapter._device.create_command_encoder()
            for i in range(calls):
                x, y = (one, other) if i % 2 else (other, one)
                encoder.copy_buffer_to_buffer(x.handle, 0, y.handle, 0, size)
            adapter._device.queue.submit([encoder.finish()])
            adapter.wait()
            found.append(2 * size * calls / (time.perf_counter() - begun) / 1e9)
        return max(found)

    def kernel() -> float:
        made = bound_launch(adapter, COPY, {0: one, 1: other}, (2048, 1))
        calls = 1 if small else 16
        return 2 * size * calls / min(adapter.seconds([made] * calls) for _ in range(5)) / 1e9

    def peak() -> float:
        steps, groups = (64, 4) if small else (PEAK_STEPS, 132 * 64)
        code = PEAK.replace("STEPS", str(steps))
        made = bound_launch(adapter, code, {0: adapter.allocate(groups * 256 * 16)}, (groups, 1))
        ends = time.monotonic() + (0 if small else 1.0)
        while time.monotonic() < ends:  # clocks rise
            adapter.seconds([made])
        bench.probe, bench.fastest = [made], adapter.seconds([made])
        return groups * 256 * 16 * steps * 2 / min(adapter.seconds([made]) for _ in range(5)) / 1e12

    bench.facts["copy_gb_per_second"] = bench.tried("copy by the API", api)
    bench.facts["copy_kernel_gb_per_second"] = bench.tried("copy by a kernel", kernel)
    bench.facts["peak_tflops"] = bench.tried("peak", peak)
    bench.say(str({key: value for key, value in bench.facts.items() if key != "errors"}))
    bench.save()
