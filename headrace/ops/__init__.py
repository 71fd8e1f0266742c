"""The op set, its packed arrays, and the back-ends that execute it."""
