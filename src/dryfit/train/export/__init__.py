"""What goes into the folder of a saved model beside it: card, example program, analysis of its answers."""
