"""It asks whoever sits before it."""

from one_layer import step

step()
if input("go on? ") == "yes":
    step()
