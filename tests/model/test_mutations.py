"""One test per clause of "runs but is wrong": the product agrees with transformers, and so does the clause's definition
in its place; the same definition wrong in that one point does not.
"""

from longstrand.bench.mutations import CLAUSES, difference


def shows_only_when_wrong(name):
    clause = CLAUSES[name]
    assert difference(name, "product") <= clause.limit
    assert difference(name, "definition") <= clause.limit
    assert difference(name, "wrong") >= clause.effect


def test_the_pool_size_is_the_configs_not_the_class_default():
    shows_only_when_wrong("kpool left at the class default")


def test_a_silent_config_has_three_dense_layers():
    shows_only_when_wrong("one dense layer instead of three")


def test_the_gate_is_a_scaled_sigmoid_not_a_clamp():
    shows_only_when_wrong("gate as a clamp")


def test_the_clamps_come_before_silu():
    shows_only_when_wrong("clamp after silu")


def test_the_gate_has_no_minimum():
    shows_only_when_wrong("a minimum on the gate")


def test_the_mhc_norm_has_its_epsilon_inside_the_root():
    shows_only_when_wrong("mHC norm as 1/(rms + eps)")


def test_sinkhorn_normalises_columns_first():
    shows_only_when_wrong("rows before columns in Sinkhorn")


def test_comb_is_applied_transposed():
    shows_only_when_wrong("comb not transposed")


def test_the_streams_end_in_an_unweighted_mean():
    shows_only_when_wrong("a learned stream head")


def test_pools_begin_anew_with_each_document():
    shows_only_when_wrong("pools crossing packed documents")


def test_a_pool_is_selectable_only_when_its_last_token_is_visible():
    shows_only_when_wrong("a pool selectable by its first token")


def test_the_open_pool_is_always_attended_to():
    shows_only_when_wrong("the tail pool left out")


def test_minus_one_is_not_pool_zero():
    shows_only_when_wrong("-1 clamped to 0 and attended")


def test_documents_of_a_pack_are_kept_apart():
    shows_only_when_wrong("packed documents ignored")


def test_queries_and_keys_are_normalised_with_the_epsilon_inside_the_root():
    shows_only_when_wrong("l2norm as F.normalize")


def test_the_correction_bias_only_selects():
    shows_only_when_wrong("correction bias inside the expert weights")


def test_the_scan_runs_from_left_to_right():
    shows_only_when_wrong("a zig-zag layout fed to a contiguous scan")


def test_each_row_is_scored_against_its_own_pools():
    shows_only_when_wrong("a wrong row offset in chunked scoring")


def test_a_chunks_inverse_holds_on_repeated_keys():
    shows_only_when_wrong("a chunk inverse by doubling")


def test_every_clause_has_its_own_test():
    import inspect
    import sys

    source = inspect.getsource(sys.modules[__name__])
    assert all(source.count(f'shows_only_when_wrong("{name}")') == 1 for name in CLAUSES)
