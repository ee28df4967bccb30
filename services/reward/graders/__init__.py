"""One grader a kind of suite: it runs the candidate's code in the lab's sandboxes and compares what comes out, here, outside of them."""
