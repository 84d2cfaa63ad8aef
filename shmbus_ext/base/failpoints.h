/* Named points at which a test can end or stop the process that passes there.
 *
 * In a build with SHMBUS_FAILPOINTS=1 (setup.py), the environment variable SHMBUS_FAILPOINT holds
 * NAME:HIT:kill or NAME:HIT:stop. On that pass through the point, counted from 1, the process sends
 * itself SIGKILL or SIGSTOP. The variable is read at the first point that a process passes. In any
 * other build a point is nothing. */
#ifndef SHMBUS_BASE_FAILPOINTS_H
#define SHMBUS_BASE_FAILPOINTS_H

#ifdef SHMBUS_FAILPOINTS
void failpoint_passed(const char *name);
#define FAILPOINT(name) failpoint_passed(name)
#else
#define FAILPOINT(name) ((void)0)
#endif

#endif
