"""Comparison of an answer with what is expected. Pure, and the trusted side's alone: a candidate never sees an expected value.

``text_problem`` and ``value_problem`` return "" for a right answer, else one sentence for the owner of the suite: it may hold test data.
Nothing that a candidate can send raises, takes more than about linear time, or is run: values are plain types out of
``sandbox/values.Decoder``.
"""
