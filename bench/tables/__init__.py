"""Tuning in simulated time: learning curves that were measured or modelled by others, and W workers that run trials.

Every system decides through its own public interface, in no time at all; only training takes time, and a trial that a
system can pause goes on from its checkpoint. So what is compared is what they decide.
"""
