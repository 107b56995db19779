"""What `collectives` reads out of programs."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import functrain as ft

TEXT = """
HloModule jit_f

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%body (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %all-gather.1 = bf16[8,4]{1,0} all-gather(%x), channel_id=1, dimensions={0}
}

%cond (p: (s32[], f32[8,4])) -> pred[] {
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (x: f32[4,4]) -> f32[] {
  %while.1 = (s32[], f32[8,4]) while(%t), condition=%cond, body=%body, TRIPS
  %start = f32[4]{0} all-reduce-start(%y), to_apply=%add
  %done = f32[4]{0} all-reduce-done(%start)
  ROOT %both = (f32[2,2]{1,0}, pred[], s8[3]) all-reduce(%a, %b, %c), channel_id=2, to_apply=%add
}
"""
KNOWN = 'backend_config={"known_trip_count":{"n":"5"}}'


def test_a_loop_counts_as_often_as_it_runs_where_that_is_known_and_each_pair_once() -> None:
    expected = {"all-gather": (5, 5 * 64), "all-reduce": (2, 16 + 16 + 1 + 3)}
    assert ft.sharding.collectives(TEXT.replace("TRIPS", KNOWN)) == expected
    once = ft.sharding.collectives(TEXT.replace("TRIPS", "metadata={}"))
    assert once == {**expected, "all-gather": (1, 64)}


def test_programs_of_jax_are_read_and_those_that_send_nothing_send_nothing() -> None:
    mesh = ft.sharding.mesh({"data": 2})
    x = jax.device_put(jnp.ones((6, 8)), NamedSharding(mesh, P("data")))

    def sums(x: jax.Array) -> jax.Array:
        def add(total: jax.Array, factor: jax.Array) -> tuple[jax.Array, None]:
            return total + jnp.sum(jnp.sin(x * total * factor), axis=0), None

        return jax.lax.scan(add, jnp.zeros(8), jnp.ones(3))[0]

    found = ft.sharding.collectives(jax.jit(sums).lower(x).compile())
    assert found["all-reduce"] == (3, 3 * 8 * 4)
    assert ft.sharding.collectives(jax.jit(jnp.sin).lower(x).compile()) == {}
