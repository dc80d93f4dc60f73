"""What makes a training fit, as both planes know it: models over ranks, groups of devices, changes of arguments."""
