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
import org.quartz.Trigger;
import org.quartz.Trigger.CompletedExecutionInstruction;
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

    private record Run(Hold fire, Optional<Hold> job) {}

    private final Holdfast client;
    private final String prefix;
    private final Duration keep;
    private final Map<String, Run> runs = new ConcurrentHashMap<>();

    /** Locks with the names {@code quartz:…}; a fire time stays taken for a minute after its run, for nodes whose clocks are late. */
    public FleetTriggerListener(Holdfast client) {
        this(client, "quartz:", Duration.ofMinutes(1));
    }

    /**
     * Locks with names of this beginning.
     *
     * @param keep for how long a fire time stays taken after its run: longer than the clocks of the nodes differ
     */
    public FleetTriggerListener(Holdfast client, String prefix, Duration keep) {
        this.client = client;
        this.prefix = prefix;
        this.keep = keep;
    }

    @Override
    public String getName() {
        return "holdfast";
    }

    @Override
    public boolean vetoJobExecution(Trigger trigger, JobExecutionContext context) {
        String job = prefix + context.getJobDetail().getKey();
        Optional<Hold> fire = Optional.empty();
        try {
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
            runs.put(context.getFireInstanceId(), new Run(fire.get(), exclusive));
            return false;
        } catch (HoldfastException why) {
            LOG.error("job '{}' does not run: its lock could not be acquired", job, why);
            fire.ifPresent(Hold::releaseAsync);
            return true;
        }
    }

    @Override
    public void triggerComplete(Trigger trigger, JobExecutionContext context, CompletedExecutionInstruction instruction) {
        Run run = runs.remove(context.getFireInstanceId());
        if (run == null) {
            return;
        }
        try {
            run.job.ifPresent(Hold::close);
        } catch (HoldfastException why) {
            LOG.warn("job '{}' was not exclusive to its end", context.getJobDetail().getKey(), why);
        }
        try {
            run.fire.releaseAfter(keep);
        } catch (HoldfastException why) {
            LOG.warn("the fire time of job '{}' was not held to its end", context.getJobDetail().getKey(), why);
        }
    }
}
