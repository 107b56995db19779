"""The engine: runs many steps in one compiled program.

Files:
  _driver: passes a carry through programs
  _programs: compiled programs, cached for as long as their step lives
  _loop: repeats a body over stacked batches, inside a program
  _fuse: the same for users, as a function of a state and a chunk
  _plan: groups batches into chunks, and chooses the number of steps in a program
  _placement: puts batches and carries on several devices
  _processes: checks that processes have the same data, arguments and programs
  _position: the progress of a run: step, epoch and batch
  _trigger: schedules by steps, epochs or seconds
  _signals: defers Ctrl-C and SIGTERM until the state is complete
  _guards: context managers that are entered while a step is traced
  _times: where the time of a run goes
  _cache: the on-disk cache of compiled programs
"""
