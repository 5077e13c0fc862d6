"""The tape's arithmetic on cases worked out by hand."""

from longstrand.plan.tape import Learns, Tape


def test_a_value_lives_while_the_code_or_the_graph_holds_it():
    tape = Tape()
    x = tape.value(10)
    (y,) = tape.op([x], [20], saves=[x], kept=3, work=7)
    assert (tape.live, tape.most) == (33, 40)
    tape.drop(x)
    assert tape.live == 33  # saved
    tape.give(y)
    assert tape.live == 53
    tape.drop(y)
    tape.walk_back()
    assert tape.live == 10  # the gradient of x alone
    assert x.grad is not None and x.grad.num_bytes == 10


def test_without_a_graph_nothing_is_saved():
    tape = Tape(graph=False)
    x = tape.value(10)
    (y,) = tape.op([x], [20], saves=[x], kept=3, work=7)
    assert (tape.live, tape.most) == (30, 40)
    tape.save(y)
    tape.drop(x, y)
    assert (tape.live, tape.nodes) == (0, [])


def test_an_output_that_its_operation_saves_outlives_the_code():
    tape = Tape()
    x = tape.view(10)
    (y,) = tape.op([x], [20])
    tape.save(y)
    tape.drop(y)
    assert tape.live == 20
    tape.give(y, 0)
    tape.walk_back()
    assert tape.live == 10


def test_what_lives_on_the_way_back():
    """Saved 10, the gradient that came 20, the one that leaves 10, and 5 + 4 for a moment; or 50 widened."""
    tape = Tape()
    x = tape.value(10)
    (y,) = tape.op([x], [20], saves=[x], back=5, learns=Learns(4, 0))
    tape.drop(x, y)
    tape.give(y)
    tape.walk_back()
    assert tape.most == 10 + 20 + 10 + 9
    tape = Tape()
    x = tape.value(10)
    (y,) = tape.op([x], [20], saves=[x], learns=Learns(4, 50))
    tape.drop(x, y)
    tape.give(y)
    tape.walk_back()
    assert tape.most == 10 + 20 + 10 + 50


def test_a_gradient_that_is_handed_on_is_counted_once():
    tape = Tape()
    a, b = tape.view(10), tape.view(10)
    (y,) = tape.op([a, b], [10], shares=True)
    tape.drop(y)
    tape.give(y)
    tape.walk_back()
    assert tape.live == 10 and a.grad is b.grad
    tape.take(a)
    assert tape.live == 10
    tape.take(b)
    assert tape.live == 0


def test_gradients_that_meet_are_added_in_place():
    tape = Tape()
    x = tape.view(10)
    outs = [tape.op([x], [1])[0] for _ in range(3)]
    tape.drop(*outs)
    for out in outs:
        tape.give(out)
    tape.walk_back()
    assert tape.live == 10
    assert tape.most == 10 + 10 + 2  # the sum so far, what is added to it, and two gradients that came


def test_an_operation_that_no_gradient_reaches_is_freed_and_costs_nothing():
    tape = Tape()
    x = tape.value(10)
    (y,) = tape.op([x], [20], saves=[x], back=100)
    tape.drop(x, y)
    tape.walk_back()
    assert (tape.live, tape.most, x.grad) == (0, 30, None)


def test_walking_back_stops_at_a_mark_and_a_leaf_has_a_gradient_of_its_own():
    tape = Tape()
    x = tape.view(10)
    (y,) = tape.op([x], [20])
    leaf = tape.leaf(y)
    mark = len(tape.nodes)
    (z,) = tape.op([leaf], [30])
    tape.give(z)
    tape.walk_back(mark)
    assert leaf.grad is not None and y.grad is None and x.grad is None
    tape.drop(leaf)
    assert tape.live == 20 + 30 + 20  # y and z, which the code holds, and the leaf's gradient
