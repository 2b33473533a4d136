package holdfast.quartz;

import holdfast.Hold;
import holdfast.Holdfast;
import holdfast.HoldfastException;
import holdfast.LockSpec;
import java.time.Duration;
import java.util.Map;
import java.util.Optional;
import java.util.concurrent.ConcurrentHashMap;
import org.quartz.JobExecutionContext;
import org.quartz.JobListener;
import org.quartz.SchedulerException;
import org.quartz.Trigger;
import org.quartz.Trigger.CompletedExecutionInstruction;
import org.quartz.listeners.JobListenerSupport;
import org.quartz.listeners.TriggerListenerSupport;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * Lets each fire time of a trigger run on one node of a fleet whose schedulers have the same jobs, without a job store that they share.
 * All nodes have to give the trigger the same fire times: a cron expression, or the same start, and a misfire instruction that ignores misfires.
 * A job whose class has {@code @DisallowConcurrentExecution} runs on one node at a time. If the server can't be reached, the job does not run.
 *
 * <p>Add it with {@code scheduler.getListenerManager().addTriggerListener(listener)}. A job may read its fence, a {@code Long}, by
 * {@code context.get(FleetTriggerListener.FENCE)}.
 */
public final class FleetTriggerListener extends TriggerListenerSupport {
    /** The key of the fencing token in the job's context. */
    public static final String FENCE = "holdfast.fence";
    private static final Logger LOG = LoggerFactory.getLogger(FleetTriggerListener.class);

    /**
     * An execution that this node has the locks for.
     *
     * @param thread executes it, and nothing else until it has ended
     */
    private record Run(String job, Thread thread, Hold fire, Optional<Hold> exclusive) {
        boolean isHeld() {
            return fire.isHeld() && exclusive.map(Hold::isHeld).orElse(true);
        }
    }

    private final Holdfast client;
    private final String prefix;
    private final Duration keep;
    private final Map<String, Run> runs = new ConcurrentHashMap<>();
    /** Quartz does not report a completion of an execution that another trigger listener vetoed. */
    private final JobListener vetoed = new JobListenerSupport() {
        @Override
        public String getName() {
            return FleetTriggerListener.this.getName();
        }

        @Override
        public void jobExecutionVetoed(JobExecutionContext context) {
            end(context.getFireInstanceId());
        }
    };

    /** Locks with the names {@code quartz:…}; a fire time stays taken for a minute after its run, for nodes whose clocks are late. */
    public FleetTriggerListener(Holdfast client) {
        this(client, "quartz:", Duration.ofMinutes(1));
    }

    /**
     * Locks with names of this beginning.
     *
     * @param keep for how long a fire time stays taken after its run: longer than the clocks of the nodes differ; at least 1 ms
     */
    public FleetTriggerListener(Holdfast client, String prefix, Duration keep) {
        this.client = client;
        this.prefix = prefix;
        this.keep = LockSpec.builder("any").lease(keep).build().lease();
    }

    @Override
    public String getName() {
        return "holdfast";
    }

    @Override
    public boolean vetoJobExecution(Trigger trigger, JobExecutionContext context) {
        String instance = context.getFireInstanceId();
        // The end of an earlier execution by this thread is not reported if a job listener threw.
        runs.forEach((id, run) -> {
            if (run.thread == Thread.currentThread() && !id.equals(instance)) {
                end(id);
            }
        });
        Run again = runs.get(instance);
        if (again != null) {
            // The job asked to be executed again immediately.
            boolean isHeld = again.isHeld();
            if (!isHeld) {
                end(instance);
            }
            return !isHeld;
        }
        String job = prefix + context.getJobDetail().getKey();
        Optional<Hold> fire = Optional.empty();
        try {
            context.getScheduler().getListenerManager().addJobListener(vetoed);
            fire = client.lock(LockSpec.of(job + "@" + context.getScheduledFireTime().getTime())).tryAcquire();
            if (fire.isEmpty()) {
                return true;
            }
            Optional<Hold> exclusive = Optional.empty();
            if (context.getJobDetail().isConcurrentExecutionDisallowed()) {
                exclusive = client.lock(job).tryAcquire();
                if (exclusive.isEmpty()) {
                    fire.get().releaseAfter(keep);
                    return true;
                }
            }
            context.put(FENCE, exclusive.orElse(fire.get()).fence());
            runs.put(instance, new Run(job, Thread.currentThread(), fire.get(), exclusive));
            return false;
        } catch (RuntimeException | SchedulerException why) {
            // Quartz would never end an execution whose listener threw, as after the client was closed.
            LOG.error("job '{}' does not run: its lock could not be acquired", job, why);
            fire.ifPresent(Hold::releaseAsync);
            return true;
        }
    }

    @Override
    public void triggerComplete(Trigger trigger, JobExecutionContext context, CompletedExecutionInstruction instruction) {
        if (instruction != CompletedExecutionInstruction.RE_EXECUTE_JOB) {
            end(context.getFireInstanceId());
        }
    }

    private void end(String instance) {
        Run run = runs.remove(instance);
        if (run == null) {
            return;
        }
        try {
            run.exclusive.ifPresent(Hold::close);
        } catch (HoldfastException why) {
            LOG.warn("job '{}' was not exclusive to its end", run.job, why);
        }
        try {
            run.fire.releaseAfter(keep);
        } catch (HoldfastException | IllegalStateException why) {
            // Also if the client was closed meanwhile. Quartz would never end an execution whose listener threw.
            LOG.warn("the fire time of job '{}' was not held to its end", run.job, why);
        }
    }
}
