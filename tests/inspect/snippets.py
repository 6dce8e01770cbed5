"""HLO written for the tests: every form in which a collective can hide."""
# ruff: noqa: E501 - XLA prints long lines

HEADER = "HloModule jit_step, is_scheduled=true, num_partitions=8"

ADD = """
%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}
"""

LOOP = f"""{HEADER}
{ADD}
%body (state: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {{
  %state = (s32[], bf16[4,8]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = bf16[4,8]{{1,0}} get-tuple-element(%state), index=1
  %start = bf16[4,8]{{1,0}} all-reduce-start(%x), channel_id=2, replica_groups=[2,4]<=[8], use_global_device_ids=true, to_apply=%add, metadata={{op_name="jit(step)/jvp(layers)/while/body/mlp/dot_general"}}, backend_config={{"collective_backend_config":{{"is_sync":false}}}}
  %square = bf16[4,8]{{1,0}} multiply(%x, %x), metadata={{op_name="jit(step)/jvp(layers)/while/body/mlp/mul"}}
  %done = bf16[4,8]{{1,0}} all-reduce-done(%start)
  %out = bf16[4,8]{{1,0}} add(%done, %square)
  ROOT %next = (s32[], bf16[4,8]{{1,0}}) tuple(%i, %out)
}}

%condition (state.1: (s32[], bf16[4,8])) -> pred[] {{
  %state.1 = (s32[], bf16[4,8]{{1,0}}) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %end = s32[] constant(6)
  ROOT %less = pred[] compare(%i.1, %end), direction=LT
}}

ENTRY %main (p: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {{
  %p = (s32[], bf16[4,8]{{1,0}}) parameter(0)
  ROOT %loop = (s32[], bf16[4,8]{{1,0}}) while(%p), condition=%condition, body=%body, backend_config={{"known_trip_count":{{"n":"6"}},"known_init_step":{{"init":"0","step":"1"}}}}
}}
"""

TICKS = f"""{HEADER}
%tick (state: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {{
  %state = (s32[], bf16[4,8]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = bf16[4,8]{{1,0}} get-tuple-element(%state), index=1
  %onward = (bf16[4,8]{{1,0}}, bf16[4,8]{{1,0}}) collective-permute-start(%x), channel_id=2, source_target_pairs={{{{0,2}},{{1,3}},{{2,4}},{{3,5}},{{4,6}},{{5,7}}}}, metadata={{op_name="jit(step)/while/body/stages/ppermute"}}
  %slot = bf16[4,8]{{1,0}} negate(%x), metadata={{op_name="jit(step)/while/body/jvp(layers)/neg"}}
  %arrived = bf16[4,8]{{1,0}} collective-permute-done(%onward)
  %back = (bf16[4,8]{{1,0}}, bf16[4,8]{{1,0}}) collective-permute-start(%slot), channel_id=3, source_target_pairs={{{{2,0}},{{3,1}},{{4,2}},{{5,3}},{{6,4}},{{7,5}}}}, metadata={{op_name="jit(step)/while/body/stages/ppermute"}}
  %mlp = bf16[4,4]{{1,0}} dot(%arrived, %arrived), lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}, metadata={{op_name="jit(step)/while/body/jvp(layers)/mlp/dot_general"}}
  %gradient = bf16[4,8]{{1,0}} collective-permute-done(%back)
  %out = bf16[4,8]{{1,0}} dot(%mlp, %gradient), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  ROOT %next = (s32[], bf16[4,8]{{1,0}}) tuple(%i, %out)
}}

%condition (state.1: (s32[], bf16[4,8])) -> pred[] {{
  %state.1 = (s32[], bf16[4,8]{{1,0}}) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %end = s32[] constant(5)
  ROOT %less = pred[] compare(%i.1, %end), direction=LT
}}

ENTRY %main (p: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {{
  %p = (s32[], bf16[4,8]{{1,0}}) parameter(0)
  ROOT %loop = (s32[], bf16[4,8]{{1,0}}) while(%p), condition=%condition, body=%tick, backend_config={{"known_trip_count":{{"n":"5"}}}}
}}
"""

RAGGED = f"""{HEADER}
ENTRY %main (x: bf16[6,8], room: bf16[16,8], at: s64[4]) -> bf16[16,8] {{
  %x = bf16[6,8]{{1,0}} parameter(0)
  %room = bf16[16,8]{{1,0}} parameter(1)
  %at = s64[4]{{0}} parameter(2)
  %start = ((bf16[6,8]{{1,0}}, bf16[16,8]{{1,0}}, s64[4]{{0}}, s64[4]{{0}}, s64[4]{{0}}, /*index=5*/s64[4]{{0}}), bf16[16,8]{{1,0}}) ragged-all-to-all-start(%x, %room, %at, %at, %at, /*index=5*/%at), channel_id=1, replica_groups=[2,4]<=[8], backend_config={{"collective_backend_config":{{"is_sync":false}}}}
  ROOT %done = bf16[16,8]{{1,0}} ragged-all-to-all-done(%start)
}}
"""

NESTED = (
    LOOP.replace("ENTRY %main", "%inner").replace("%p ", "%q ").replace("(%p)", "(%q)").replace("(p:", "(q:")
    + """
%outer_condition (s: (s32[], bf16[4,8])) -> pred[] {
  %s = (s32[], bf16[4,8]{1,0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (p: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %p = (s32[], bf16[4,8]{1,0}) parameter(0)
  ROOT %outside = (s32[], bf16[4,8]{1,0}) while(%p), condition=%outer_condition, body=%inner, backend_config={"known_trip_count":{"n":"5"}}
}
"""
)

UNKNOWN_LENGTH = LOOP.replace('"known_trip_count":{"n":"6"},', "")

ASYNC_WRAPPED = f"""{HEADER}
%wrapped (a: f32[16,4]) -> f32[2,4] {{
  %a = f32[16,4]{{1,0}} parameter(0)
  ROOT %scatter = f32[2,4]{{1,0}} reduce-scatter(%a), channel_id=1, replica_groups={{{{0,1,2,3,4,5,6,7}}}}, dimensions={{0}}, to_apply=%add, metadata={{op_name="jit(step)/gradients/psum_scatter"}}
}}
{ADD}
ENTRY %main (p: f32[16,4], q: f32[64,64]) -> f32[2,4] {{
  %p = f32[16,4]{{1,0}} parameter(0)
  %q = f32[64,64]{{1,0}} parameter(1)
  %begin = ((f32[16,4]{{1,0}}), f32[2,4]{{1,0}}, u32[]) async-start(%p), calls=%wrapped
  %busy = f32[64,64]{{1,0}} dot(%q, %q), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, metadata={{op_name="jit(step)/optimizer/dot_general"}}
  %between = ((f32[16,4]{{1,0}}), f32[2,4]{{1,0}}, u32[]) async-update(%begin)
  ROOT %end = f32[2,4]{{1,0}} async-done(%between)
}}
"""

BRANCHES = f"""{HEADER}
%yes (a: f32[4]) -> f32[16] {{
  %a = f32[4]{{0}} parameter(0)
  ROOT %gather = f32[16]{{0}} all-gather(%a), channel_id=1, replica_groups={{{{0,1,2,3}},{{4,5,6,7}}}}, dimensions={{0}}, use_global_device_ids=true
}}

%no (b: f32[4]) -> f32[16] {{
  %b = f32[4]{{0}} parameter(0)
  ROOT %wide = f32[16]{{0}} pad(%b, %b), padding=0_12
}}

ENTRY %main (c: pred[], p: f32[4]) -> f32[16] {{
  %c = pred[] parameter(0)
  %p = f32[4]{{0}} parameter(1)
  ROOT %either = f32[16]{{0}} conditional(%c, %p, %p), true_computation=%yes, false_computation=%no
}}
"""

FUSED_AND_CALLED = f"""{HEADER}
%fused (a: f32[4]) -> f32[4] {{
  %a = f32[4]{{0}} parameter(0)
  ROOT %permute = f32[4]{{0}} collective-permute(%a), channel_id=3, source_target_pairs={{{{0,4}},{{4,0}},{{1,5}},{{5,1}},{{2,6}},{{6,2}},{{3,7}},{{7,3}}}}
}}

%called (b: f32[4]) -> f32[4] {{
  %b = f32[4]{{0}} parameter(0)
  ROOT %swap = f32[4]{{0}} all-to-all(%b), replica_groups=[1,8]<=[8], dimensions={{0}}
}}

ENTRY %main (p: f32[4]) -> f32[4] {{
  %p = f32[4]{{0}} parameter(0)
  %f = f32[4]{{0}} fusion(%p), kind=kLoop, calls=%fused
  ROOT %c = f32[4]{{0}} call(%f), to_apply=%called
}}
"""

SEVERAL_OPERANDS = f"""{HEADER}
{ADD}
ENTRY %main (p: f32[4], q: bf16[2,3]) -> (f32[16], bf16[8,3]) {{
  %p = f32[4]{{0}} parameter(0)
  %q = bf16[2,3]{{1,0}} parameter(1)
  %sync = (f32[4]{{0}}, bf16[2,3]{{1,0}}) all-reduce-start(%p, %q), channel_id=1, replica_groups={{}}, to_apply=%add, metadata={{op_name="jit(step)/optimizer/(a:b)"}}, backend_config={{"collective_backend_config":{{"is_sync":true}}}}
  %sync.done = (f32[4]{{0}}, bf16[2,3]{{1,0}}) all-reduce-done(%sync)
  %g = ((f32[4]{{0}}, bf16[2,3]{{1,0}}), (f32[16]{{0}}, /*index=1*/bf16[8,3]{{1,0}})) all-gather-start(%p, %q), channel_id=2, replica_groups=[2,4]<=[8], dimensions={{0}}
  ROOT %g.done = (f32[16]{{0}}, bf16[8,3]{{1,0}}) all-gather-done(%g)
}}
"""

UNKNOWN_OPERATIONS = f"""{HEADER}
ENTRY %main (p: f32[4]) -> f32[4] {{
  %p = f32[4]{{0}} parameter(0)
  %novel = f32[4]{{0}} teleport(%p), channel_id=9, replica_groups=[2,4]<=[8]
  %library = f32[4]{{0}} custom-call(%novel), custom_call_target="xla.gpu.nvshmem_put", api_version=API_VERSION_TYPED_FFI
  %plain = f32[4]{{0}} frobnicate(%library), strength=3
  %odd = f32[4]{{0}} all-reduce(%plain), replica_groups={{{{0,1,2}},{{3,4,5}},{{6,7}}}}, to_apply=%add
  %future = f32[4]{{0}} all-reduce(%odd), replica_groups=<hypercube>, to_apply=%add
  ROOT %text = f32[4]{{0}} custom-call(%future), custom_call_target="topk (fast)", metadata={{op_name="jit(step)/a \\"quoted) name"}}
}}
"""

LOST_NAMES = f"""{HEADER}
{ADD}
ENTRY %main (p: f32[4], q: f32[4]) -> f32[8] {{
  %p = f32[4]{{0}} parameter(0)
  %q = f32[4]{{0}} parameter(1)
  %g = f32[4]{{0}} negate(%p), metadata={{op_name="jit(step)/gradients/neg"}}
  %joined = f32[8]{{0}} concatenate(%g, %q), dimensions={{0}}
  ROOT %combined = f32[8]{{0}} all-reduce(%joined), replica_groups={{{{0,4}},{{1,5}},{{2,6}},{{3,7}}}}, to_apply=%add
}}
"""

BEHIND_A_LOOP = f"""{HEADER}
{ADD}
%body (state: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {{
  ROOT %state = (s32[], bf16[4,8]{{1,0}}) parameter(0)
}}

%condition (state.1: (s32[], bf16[4,8])) -> pred[] {{
  %state.1 = (s32[], bf16[4,8]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%state.1), index=0
  %end = s32[] constant(6)
  ROOT %less = pred[] compare(%i, %end), direction=LT
}}

ENTRY %main (p: (s32[], bf16[4,8])) -> bf16[4,8] {{
  %p = (s32[], bf16[4,8]{{1,0}}) parameter(0)
  %loop = (s32[], bf16[4,8]{{1,0}}) while(%p), condition=%condition, body=%body, metadata={{op_name="jit(step)/transpose(jvp(layers))/while"}}, backend_config={{"known_trip_count":{{"n":"6"}}}}
  %last = bf16[4,8]{{1,0}} get-tuple-element(%loop), index=1
  %start = bf16[4,8]{{1,0}} all-reduce-start(%last), replica_groups={{{{0,1,2,3}},{{4,5,6,7}}}}, to_apply=%add
  %sum = bf16[4,8]{{1,0}} all-reduce-done(%start)
  ROOT %used = bf16[4,8]{{1,0}} negate(%sum), metadata={{op_name="jit(step)/jvp(layers)/mlp/neg"}}
}}
"""

FUSED_OUTPUTS = f"""{HEADER}
{ADD}
%fused (a: f32[4], b: f32[4]) -> (f32[4], f32[4]) {{
  %a = f32[4]{{0}} parameter(0)
  %b = f32[4]{{0}} parameter(1)
  %logits = f32[4]{{0}} negate(%a), metadata={{op_name="jit(step)/transpose(jvp(loss))/neg"}}
  %rows = f32[4]{{0}} negate(%b), metadata={{op_name="jit(step)/jvp(embedding)/gather"}}
  ROOT %both = (f32[4]{{0}}, f32[4]{{0}}) tuple(%logits, %rows)
}}

ENTRY %main (p: f32[4], q: f32[4]) -> f32[4] {{
  %p = f32[4]{{0}} parameter(0)
  %q = f32[4]{{0}} parameter(1)
  %f = (f32[4]{{0}}, f32[4]{{0}}) fusion(%p, %q), kind=kLoop, calls=%fused, metadata={{op_name="jit(step)/transpose(jvp(loss))/neg"}}
  %second = f32[4]{{0}} get-tuple-element(%f), index=1, metadata={{op_name="jit(step)/transpose(jvp(loss))/neg"}}
  ROOT %combined = f32[4]{{0}} all-reduce(%second), replica_groups={{{{0,1,2,3}},{{4,5,6,7}}}}, to_apply=%add
}}
"""

PACKED = f"""{HEADER}
{ADD}
%packing (a: f32[1], b: f32[128]) -> f32[129] {{
  %a = f32[1]{{0}} parameter(0)
  %b = f32[128]{{0}} parameter(1)
  ROOT %both = f32[129]{{0}} concatenate(%a, %b), dimensions={{0}}
}}

ENTRY %main (norm: f32[1], bias: f32[128]) -> f32[129] {{
  %norm = f32[1]{{0}} parameter(0)
  %bias = f32[128]{{0}} parameter(1)
  %packed = f32[129]{{0}} fusion(%norm, %bias), kind=kLoop, calls=%packing
  ROOT %sum = f32[129]{{0}} all-reduce(%packed), channel_id=1, replica_groups=[4,2]<=[2,4]T(1,0), use_global_device_ids=true, to_apply=%add, metadata={{op_name="jit(step)/(optimizer/reduce_sum:shard_map/gradients/psum)"}}
}}
"""

PACKED_WITHOUT_NAME = f"""{HEADER}
{ADD}
%packing (a: f32[16], b: f32[128]) -> f32[144] {{
  %a = f32[16]{{0}} parameter(0)
  %b = f32[128]{{0}} parameter(1)
  ROOT %both = f32[144]{{0}} concatenate(%a, %b), dimensions={{0}}
}}

ENTRY %main (x: f32[2,8], y: f32[128]) -> f32[144] {{
  %x = f32[2,8]{{1,0}} parameter(0)
  %y = f32[128]{{0}} parameter(1)
  %load = f32[2,8]{{1,0}} negate(%x), metadata={{op_name="jit(step)/transpose(jvp(layers))/while/body/checkpoint/rematted_computation/mlp/router/reduce_sum"}}
  %flat = f32[16]{{0}} bitcast(%load)
  %norm = f32[128]{{0}} negate(%y), metadata={{op_name="jit(step)/transpose(jvp(layers))/while/body/checkpoint/mlp/reduce_sum"}}
  %packed = f32[144]{{0}} fusion(%flat, %norm), kind=kLoop, calls=%packing
  ROOT %sum = f32[144]{{0}} all-reduce(%packed), channel_id=1, replica_groups=[2,4]<=[8], use_global_device_ids=true, to_apply=%add
}}
"""
